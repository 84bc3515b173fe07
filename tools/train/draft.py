"""Train the drafter: `python -m tools.train.draft RUN --minutes 8`, after the target.

Every chat gives several blocks: an anchor drawn from the tokens of the reply, then masks. A block
learns the target's greedy continuation of its anchor: slot j is what the target would say after the
text so far, for as long as the text is what the target itself would have said. Two losses, both
over the whole vocabulary: the unary scores, and those with the selector's term for the right
predecessor; slots weigh less the later they come, since they count only if all before them do.
The module is the plain reference (graphs/reference/dflash.py). The target is read as the release
stores it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gpurt.graphs.muse_spark_config import PREFIX
from gpurt.graphs.reference.dflash import DFlash
from tools.train.data import Batch, Shape
from tools.train.loop import STOPPED_EXIT_CODE, Limits, train
from tools.train.model import Target
from tools.train.optimiser import Optimiser, rate_scale
from tools.train.recipe import Recipe, draft_config, quantised_layers, read_recipe
from tools.train.target import on_device, padded, probe_documents, settings_of, target_model
from tools.train.text import Encoder

# A block from every token of a reply: attention over thousands of rows a chat.
_PROBE_ROWS = 8
_SEED_APART = 1 << 20  # the drafter's chats are not the target's


@dataclass(frozen=True)
class Blocks:
    """Blocks over chats. features: [N, T, taps * hidden]. anchors: [N, J] positions. first: [N, J]
    the anchors' tokens. labels: [N, J, B - 1] what the target says. weight: the same shape, 0 past
    the end and where the text left the target's path.
    """

    features: torch.Tensor
    anchors: torch.Tensor
    first: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor


class DraftJob:
    """A drafter in training. See loop.Job."""

    name = "draft"

    def __init__(self, recipe: Recipe, run: Path, device: str) -> None:
        """Raises: ValueError if there is no target."""
        self.recipe, self.device, self.steps = recipe, torch.device(device), recipe.draft_steps
        tokenizer = run / "tokenizer.json"
        self.shape = Shape(
            tokenizer,
            recipe.seed + _SEED_APART,
            recipe.draft_rows,
            recipe.draft_length,
            packed=False,
            talk=recipe.talk,
            stories=recipe.stories,
        )
        self.encoder = Encoder(tokenizer)
        self.target = released_target(recipe, run, device)
        torch.manual_seed(recipe.seed)
        self.model = DFlash(draft_config(recipe)).to(device)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        rows = recipe.draft_anchors * recipe.block
        self.tokens_per_step = recipe.draft_rows * rows
        count = sum(tensor.numel() for tensor in self.model.parameters())
        context = recipe.draft_length * 2 * sum(t.numel() for t in self.target.parameters()) / 2
        self.flops_per_step = recipe.draft_rows * (6 * count * rows + context)
        self.optimiser = _optimiser(self.model, recipe)
        weights = self.target.used()
        self.embedding = weights[f"{PREFIX}.embed_tokens.weight"].detach()
        self.head = weights["lm_head.weight"].detach()

    def step(self, index: int, batch: Batch) -> dict[str, torch.Tensor]:
        """See loop.Job."""
        recipe = self.recipe
        blocks = self.blocks(batch, self._draw(batch))
        with self._precision():
            hidden = self.hidden(blocks)
            unary = self.model.logits(hidden, self.head.to(hidden.dtype))
            paired = unary + self.pair_scores(hidden, blocks)
        slots = torch.arange(recipe.block - 1, device=self.device)
        weight = blocks.weight * torch.exp(-slots / recipe.draft_slot_decay)
        total = weight.sum().clamp(min=1)
        loss, with_pair = (
            (_losses(scores, blocks.labels) * weight).sum() / total for scores in (unary, paired)
        )
        (loss + with_pair).backward()
        scale = rate_scale(index, recipe.draft_steps, recipe.warmup, recipe.decay)
        self.optimiser.step(scale)
        with torch.no_grad():
            right = (paired.argmax(-1) == blocks.labels) & (blocks.weight > 0)
            first = right[..., 0].sum() / blocks.weight[..., 0].sum().clamp(min=1)
        return {"loss": loss, "selector_loss": with_pair, "first_slot_right": first}

    def hidden(self, blocks: Blocks) -> torch.Tensor:
        """States of the masks, [N, J, B - 1, hidden]."""
        x = self.model.embedded(self.embedding.float(), blocks.first)
        return self.model(blocks.features, blocks.anchors, x)[:, :, 1:]

    def pair_scores(self, hidden: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The selector's term for every token of the vocabulary, after the right predecessor."""
        selector = self.model.candidate_selector
        before = torch.cat([blocks.first[..., None], blocks.labels[..., :-1]], -1)
        pair = functional.embedding(before, selector.predecessor_codebook)
        pair = pair * selector.hidden_projection(hidden)
        return (pair @ selector.successor_codebook.T.to(pair.dtype)).float()

    @torch.no_grad()
    def blocks(self, batch: Batch, anchors: torch.Tensor) -> Blocks:
        """The target's features, and what it says after each anchor. anchors: [N, J] positions,
        -1 where there is none.
        """
        inputs, document, _ = on_device(batch, self.target, self.device)
        logits, streams, _ = self.target(inputs, taps=self.recipe.taps)
        says = logits.argmax(-1)  # [N, T]: after position t
        ids, length = inputs.ids, inputs.ids.shape[1]
        real = anchors.to(self.device) >= 0
        anchors = anchors.to(self.device).clamp(min=0)
        at = anchors[..., None] + torch.arange(self.recipe.block - 1, device=self.device)
        inside = at < length - 1
        at = at.clamp(max=length - 2)
        row = torch.arange(len(ids), device=self.device)[:, None, None]
        labels, text = says[row, at], ids[row, at + 1]
        goes_on = inside & (document[row, at + 1] > 0)
        # Slot j counts if the text of slots before it is what the target says.
        same = (labels == text) & goes_on
        path = torch.cat([torch.ones_like(same[..., :1]), same[..., :-1]], -1).cumprod(-1)
        weight = (path.bool() & goes_on & real[..., None]).float()
        features = torch.cat(streams, -1).to(self.target.dtype).float()
        return Blocks(features, anchors, ids[row[..., 0], anchors], labels, weight)

    @torch.no_grad()
    def probe(self) -> dict[str, float]:
        """Tokens a step on held-out problems whose reply the target writes exactly."""
        steps = tokens = 0
        documents = probe_documents(self.encoder, self.recipe, self.device)
        for begin in range(0, len(documents), _PROBE_ROWS):
            batch = padded(documents[begin : begin + _PROBE_ROWS])
            every = torch.where(torch.from_numpy(batch.reply), torch.arange(batch.ids.shape[1]), -1)
            blocks = self.blocks(batch, every)
            taken = self.accepted(blocks).cpu()
            for row, document in enumerate(documents[begin : begin + _PROBE_ROWS]):
                position, end = int(document.reply.argmax()), len(document.ids) - 1
                if not bool((blocks.weight[row, position:end, 0] > 0).all()):
                    continue
                while position < end:
                    step = min(int(taken[row, position]) + 1, end - position)
                    position, steps, tokens = position + step, steps + 1, tokens + step
        return {"tokens_per_step": tokens / max(1, steps)}

    def accepted(self, blocks: Blocks) -> torch.Tensor:
        """How many proposals of the greedy walk are the target's own, [N, J]."""
        with self._precision():
            hidden = self.hidden(blocks)
            unary = self.model.logits(hidden, self.head.to(hidden.dtype))
        best, ids = unary.topk(self.recipe.selector_top_k, -1)
        before, right = blocks.first, []
        for slot in range(self.recipe.block - 1):
            scores = self.model.candidate_selector(hidden[:, :, slot], before, ids[:, :, slot])
            index = (best[:, :, slot] + scores).argmax(-1, keepdim=True)
            before = ids[:, :, slot].gather(-1, index)[..., 0]
            right.append((before == blocks.labels[..., slot]) & (blocks.weight[..., slot] > 0))
        return torch.stack(right, -1).int().cumprod(-1).sum(-1)

    def state(self) -> dict[str, Any]:
        """See loop.Job."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state(),
            "anchors": self.generator.get_state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See loop.Job."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load(state["optimiser"])
        self.generator.set_state(state["anchors"])

    def _draw(self, batch: Batch) -> torch.Tensor:
        """Anchors of a batch: different tokens of each reply, -1 beyond their number."""
        reply = torch.from_numpy(batch.reply)
        order = torch.rand(reply.shape, generator=self.generator).masked_fill(~reply, -1)
        best = order.topk(self.recipe.draft_anchors, -1)
        return torch.where(best.values >= 0, best.indices, -1)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda")


def released_target(recipe: Recipe, run: Path, device: str) -> Target:
    """The target of a run as the release has it: rounded to NVFP4. Raises: ValueError."""
    path = run / "target.pt"
    if not path.exists():
        msg = f"no checkpoint of a target - at {path}"
        raise ValueError(f"{msg} - train it first: python -m tools.train.target {run}")
    model = target_model(recipe, device, settings_of(run)["experts"])
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["job"]["model"])
    model.requires_grad_(False)
    model.quantised = quantised_layers(recipe)
    return model


def _losses(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


def _optimiser(model: DFlash, recipe: Recipe) -> Optimiser:
    parameters = dict(model.named_parameters())
    rate, muon, adam = recipe.draft_rate, {}, {}
    for name, tensor in parameters.items():
        if "codebook" in name:
            adam[name] = rate
        elif tensor.ndim == 2 and "kernel_projection" not in name:
            muon[name] = 2 * rate
        else:
            adam[name] = rate / 5
    return Optimiser(parameters, muon, adam, recipe.weight_decay)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when all steps are done, 75 when it was stopped before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop and save after these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, help="processes that make data")
    options = parser.parse_args(arguments)
    recipe = read_recipe(options.run)
    if recipe is None:
        parser.error(f"no recipe - at {options.run} - begin with python -m tools.train.target")
    job = DraftJob(recipe, options.run, options.device)
    print(f"draft: {sum(tensor.numel() for tensor in job.model.parameters()):,} parameters")
    done = train(job, options.run, Limits(options.minutes, options.workers))
    return 0 if done else STOPPED_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
