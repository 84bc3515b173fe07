"""How muse-spark-nano and its drafter are made: data, tokenizer, training, export, evaluation."""
