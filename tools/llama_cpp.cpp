// llama.cpp as an outside reference: its token ids of any text, and its CPU decode speed.
//
//   llama_cpp tokens MODEL.gguf < texts, NUL after each   two lines a text: with control tokens
//                                                         recognised, and without
//   llama_cpp decode MODEL.gguf THREADS                   tokens per second, greedy, 5 + 256 tokens
// tools/token_fixture.py drives the first. Links against an installed llama.cpp (llama.h).
#include <llama.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

void print_ids(const llama_vocab* vocab, const std::string& text, bool control) {
  std::vector<llama_token> ids(text.size() + 16);
  const int count = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), ids.data(),
                                   static_cast<int>(ids.size()), true, control);
  for (int i = 0; i < count; ++i) std::printf("%d ", ids[static_cast<size_t>(i)]);
  std::printf("\n");
}

void tokens(const llama_vocab* vocab) {
  std::string text;
  for (int c = std::getchar(); c != EOF; c = std::getchar()) {
    if (c != 0) {
      text.push_back(static_cast<char>(c));
      continue;
    }
    print_ids(vocab, text, true);
    print_ids(vocab, text, false);
    text.clear();
  }
}

llama_token largest(const float* logits, int count) {
  int best = 0;
  for (int i = 1; i < count; ++i) {
    if (logits[i] > logits[best]) best = i;
  }
  return best;
}

void decode(llama_model* model, const llama_vocab* vocab, int threads) {
  constexpr int kTokens = 256;
  auto options = llama_context_default_params();
  options.n_ctx = 512;
  options.n_threads = options.n_threads_batch = threads;
  llama_context* context = llama_init_from_model(model, options);
  std::vector<llama_token> prompt = {504, 3575, 282, 4649, 314};  // "The capital of France is"
  llama_decode(context, llama_batch_get_one(prompt.data(), static_cast<int>(prompt.size())));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kTokens; ++i) {
    const int vocab_size = llama_vocab_n_tokens(vocab);
    llama_token token = largest(llama_get_logits_ith(context, -1), vocab_size);
    llama_decode(context, llama_batch_get_one(&token, 1));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("{\"threads\": %d, \"tokens_per_second\": %.1f}\n", threads,
              kTokens / seconds.count());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 2 ? argv[1] : "";
  if (mode != "tokens" && !(mode == "decode" && argc > 3)) {
    std::fprintf(stderr, "usage: llama_cpp tokens MODEL | decode MODEL THREADS\n");
    return 2;
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  auto options = llama_model_default_params();
  options.vocab_only = mode == "tokens";
  llama_model* model = llama_model_load_from_file(argv[2], options);
  if (model == nullptr) return 1;
  const llama_vocab* vocab = llama_model_get_vocab(model);
  if (mode == "tokens") {
    tokens(vocab);
  } else {
    decode(model, vocab, std::atoi(argv[3]));
  }
  return 0;
}
