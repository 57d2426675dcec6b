#!/usr/bin/env python3
"""Train tiny-qwen3, a small Qwen3 language model, from Python's own documentation.

The training text is ``pydoc_data.topics``, the reference documentation behind ``help()``, so
nothing is downloaded. Each topic is seen as plain text and as a chat ("Explain the with
statement." answered by the topic's text). A contiguous slice of the topics is held out. Its loss
stays near its minimum for long while the answers to chats still improve, so the latest weights
within a tolerance of that minimum are kept; they are stored in bfloat16.

    python train.py                      # train into build/tiny-qwen3/model
    python train.py --resume             # continue an interrupted training
    python train.py --steps 20 --out x   # smoke test
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import hashlib
import math
import platform
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

MAX_POSITIONS = 1024
LENGTHS = (256, 512, 1024)
LENGTH_WEIGHTS = torch.tensor([0.7, 0.2, 0.1])
EVAL_LENGTH = 512
MAX_ANSWER_CHARS = 900

END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QUESTIONS = (
    "Explain {}.",
    "Explain {}",
    "What does the Python documentation say about {}?",
)
CAPITALISED = re.compile(r"\b[A-Z][a-z]+\b")
NOT_PROSE = re.compile(r" |\*\*Source code|=|New in version|Note:|object\.__")
HEADING = re.compile(r"^(?P<title>\S.*)\n(?P<rule>[*=\-~^\"])(?P=rule){2,}\n", re.MULTILINE)

CARD_BEGIN, CARD_END = "<!-- train.py: begin -->", "<!-- train.py: end -->"
TEXT_PROMPTS = ("The with statement", "When an exception is raised", "The following methods")
CHAT_PROMPTS = ("Explain the with statement.", "Explain string methods.")


def setting(default: Any, text: str) -> Any:
    """Declare a field of `Settings` that is also a command-line option with this help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """Everything that, with the library versions, decides the trained weights."""

    steps: int = setting(1600, "optimizer steps at most")
    batch_tokens: int = setting(2048, "tokens in each step")
    learning_rate: float = setting(2e-3, "peak learning rate")
    warmup: float = setting(0.05, "share of the steps spent warming up")
    weight_decay: float = setting(0.2, "AdamW weight decay of the matrices")
    dropout: float = setting(0.2, "dropout after the embedding, attention and MLP blocks")
    clip: float = setting(1.0, "largest gradient norm")
    chat_share: float = setting(0.25, "share of the training rows that are chats")
    eval_every: int = setting(50, "steps between held-out evaluations and checkpoints")
    tolerance: float = setting(0.1, "keep the latest weights this close to the best held-out loss")
    patience: int = setting(10, "evaluations that keep no weights before stopping early")
    precision: str = setting("bf16", "arithmetic of the training steps: bf16 or fp32")
    seed: int = setting(0, "random seed")
    holdout_first: str = setting("objects", "first held-out topic, in sorted order")
    holdout_last: str = setting("return", "last held-out topic, in sorted order")
    vocab_size: int = setting(2048, "tokens in the vocabulary")
    hidden_size: int = setting(256, "width of the model")
    intermediate_size: int = setting(512, "width of the MLP blocks")
    layers: int = setting(4, "number of layers")
    heads: int = setting(4, "number of attention heads")
    kv_heads: int = setting(2, "number of key-value heads")
    head_dim: int = setting(64, "width of an attention head")


@dataclass
class Progress:
    """Where a training stands, apart from weights and optimizer state."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    kept_loss: float = math.inf
    kept_step: int = 0


@dataclass(frozen=True)
class Corpus:
    """The topics, split into training and held-out text."""

    train: dict[str, str]
    heldout: dict[str, str]
    sha256: str


def load_corpus(first: str, last: str) -> Corpus:
    """Hold out the topics from `first` to `last`.

    Topics quote one another, so paragraphs of the held-out text are dropped from the training
    text wherever they occur.
    """
    heldout = {name: topics[name] for name in sorted(topics) if first <= name <= last}
    if not heldout:
        raise SystemExit(f"no topic lies between {first!r} and {last!r}")
    hidden = {part.strip() for text in heldout.values() for part in text.split("\n\n")}
    train = {
        name: "\n\n".join(part for part in topics[name].split("\n\n") if part.strip() not in hidden)
        for name in sorted(topics)
        if name not in heldout
    }
    everything = "\0".join(f"{name}\0{topics[name]}" for name in sorted(topics))
    return Corpus(train, heldout, hashlib.sha256(everything.encode()).hexdigest())


def chat_examples(texts: dict[str, str]) -> list[list[dict[str, str]]]:
    """Turn every section of every topic into chats that ask for it by name."""
    chats = []
    for topic, text in texts.items():
        headings = list(HEADING.finditer(text))
        ends = [heading.start() for heading in headings[1:]] + [len(text)]
        for index, (heading, end) in enumerate(zip(headings, ends, strict=True)):
            answer = lead(text[heading.end() : end])
            if not answer:
                continue
            title = CAPITALISED.sub(lambda word: word[0].lower(), heading["title"].replace('"', ""))
            names = [title, topic] if index == 0 and title != topic else [title]
            chats += [
                [
                    {"role": "user", "content": question.format(name)},
                    {"role": "assistant", "content": answer},
                ]
                for name in names
                for question in QUESTIONS
            ]
    return chats


def lead(text: str) -> str:
    """Return the paragraphs that open a section: from its first prose on, as many as fit."""
    paragraphs = text.strip("\n").split("\n\n")
    while paragraphs and NOT_PROSE.match(paragraphs[0]):
        del paragraphs[0]
    kept = ""
    for paragraph in paragraphs:
        if kept and len(kept) + len(paragraph) > MAX_ANSWER_CHARS:
            break
        kept += paragraph + "\n\n"
    return kept.rstrip()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ChatML-like special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, CHAT_START, CHAT_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        eos_token=CHAT_END,
        extra_special_tokens=[CHAT_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> list[int]:
    """Encode the texts as one stream, each ended by the end-of-text token."""
    encode = tokenizer.backend_tokenizer.encode
    return [token for text in texts for token in encode(text + END_OF_TEXT).ids]


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Create the untrained model, with dropout that is part of the training only."""
    config = Qwen3Config(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        max_window_layers=settings.layers,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)

    def drop(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, settings.dropout, module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)
    return model


def sample_batch(
    stream: list[int], chats: list[list[int]], settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and targets: windows of the stream, and rows of chats joined at random."""
    length = LENGTHS[int(torch.multinomial(LENGTH_WEIGHTS, 1))]
    rows = []
    for _ in range(max(1, settings.batch_tokens // length)):
        row: list[int] = []
        if torch.rand(()) < settings.chat_share:
            while len(row) <= length:
                row += chats[int(torch.randint(len(chats), ()))]
        else:
            start = int(torch.randint(len(stream) - length, ()))
            row = stream[start : start + length + 1]
        rows.append(row[: length + 1])
    batch = torch.tensor(rows)
    return batch[:, :-1], batch[:, 1:]


def token_loss(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Return the cross-entropy of the targets in nats."""
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: nn.Module, stream: list[int]) -> float:
    """Return the mean loss in nats per token over the whole stream, in separate windows."""
    training = model.training
    model.eval()
    total = 0.0
    for start in range(0, len(stream) - 1, EVAL_LENGTH):
        window = torch.tensor([stream[start : start + EVAL_LENGTH + 1]])
        total += float(token_loss(model, window[:, :-1], window[:, 1:], "sum"))
    model.train(training)
    return total / (len(stream) - 1)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Create AdamW with weight decay on the matrices and none on the norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))


def learning_rate(step: int, settings: Settings) -> float:
    """Return the rate for a step: linear warm-up, then a cosine down to a twentieth."""
    warmup = max(1, round(settings.warmup * settings.steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    return settings.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def train(
    model: Qwen3ForCausalLM,
    stream: list[int],
    chats: list[list[int]],
    heldout: list[int],
    settings: Settings,
    checkpoint: Path,
    resume: bool,
) -> Progress:
    """Train the model and leave it with the kept weights."""
    optimizer = make_optimizer(model, settings)
    progress = Progress()
    kept = model.state_dict()
    if resume:
        state = torch.load(checkpoint, weights_only=True)
        if state["settings"] != asdict(settings):
            raise SystemExit(f"{checkpoint} was written with other settings")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        kept, progress = state["kept"], Progress(**state["progress"])

    model.train()
    first_step, earlier, started = progress.step, progress.seconds, time.monotonic()
    while progress.step < settings.steps:
        rate = learning_rate(progress.step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = sample_batch(stream, chats, settings)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16"):
            loss = token_loss(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        progress.step += 1

        evaluating = progress.step % settings.eval_every == 0 or progress.step == settings.steps
        if not evaluating and progress.step % 10:
            continue
        line = f"step {progress.step}/{settings.steps}  loss {loss.item():.3f}  lr {rate:.1e}"
        if evaluating:
            heldout_loss = evaluate(model, heldout)
            progress.best_loss = min(progress.best_loss, heldout_loss)
            if heldout_loss <= progress.best_loss + settings.tolerance:
                progress.kept_loss, progress.kept_step = heldout_loss, progress.step
                kept = {name: value.clone() for name, value in model.state_dict().items()}
            line += f"  held-out {heldout_loss:.4f} (best {progress.best_loss:.4f})"
        spent = time.monotonic() - started
        progress.seconds = earlier + spent
        left = spent / (progress.step - first_step) * (settings.steps - progress.step)
        print(f"{line}  ETA {left / 60:.1f} min", flush=True)
        if evaluating:
            save_checkpoint(
                checkpoint,
                {
                    "settings": asdict(settings),
                    "progress": asdict(progress),
                    "model": model.state_dict(),
                    "kept": kept,
                    "optimizer": optimizer.state_dict(),
                    "rng": torch.get_rng_state(),
                },
            )
            if progress.step - progress.kept_step >= settings.patience * settings.eval_every:
                print("the held-out loss stays above its minimum: stopping early")
                break
    model.load_state_dict(kept)
    model.eval()
    return progress


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the tokenizer and the bfloat16 model to the folder `out`."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


def generate(model: Any, tokenizer: Any, prompt: str, greedy: bool, seed: int) -> str:
    """Complete a prompt with up to 96 tokens."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    choice = {"do_sample": False, "temperature": None, "top_p": None} if greedy else {}
    output = model.generate(**inputs, max_new_tokens=96, **choice)
    text: str = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return text


def table(head: str, rows: dict[str, Any]) -> str:
    """Format two columns as a Markdown table."""
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([f"| {head} | Value |", "|---|---|", *lines])


def describe_samples(model: Any, tokenizer: Any, seed: int) -> str:
    """Format completions of the sample prompts as Markdown."""
    prompts = [(prompt, prompt) for prompt in TEXT_PROMPTS]
    for question in CHAT_PROMPTS:
        chat = [{"role": "user", "content": question}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append((f"{question} (chat)", rendered))
    blocks = []
    for title, prompt in prompts:
        for kind in ("greedy", "sampled"):
            text = generate(model, tokenizer, prompt, kind == "greedy", seed)
            body = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
            blocks.append(f"**{title}** ({kind})\n\n~~~text\n{body}\n~~~")
    return "\n\n".join(blocks)


def write_card(path: Path, section: str) -> None:
    """Put the generated section into the model card, keeping what is written around it."""
    card = path.read_text(encoding="utf-8") if path.exists() else "# tiny-qwen3\n"
    before, _, rest = card.partition(CARD_BEGIN)
    after = rest.partition(CARD_END)[2]
    block = f"{CARD_BEGIN}\n{section}\n{CARD_END}"
    path.write_text(f"{before.rstrip()}\n\n{block}\n{after.lstrip()}", encoding="utf-8")


def parse_args() -> tuple[argparse.Namespace, Settings]:
    """Read the command line; every field of `Settings` is an option."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    work_dir = Path("build/tiny-qwen3")
    parser.add_argument(
        "--work-dir", type=Path, default=work_dir, help="folder of checkpoints (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder of the model (WORK_DIR/model)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    for item in fields(Settings):
        parser.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=type(item.default),
            default=item.default,
            help=f"{item.metadata['help']} (%(default)s)",
        )
    args = parser.parse_args()
    settings = Settings(**{item.name: getattr(args, item.name) for item in fields(Settings)})
    if settings.precision not in ("bf16", "fp32"):
        parser.error("--precision is bf16 or fp32")
    if args.resume and not checkpoint_path(args.work_dir).exists():
        parser.error(f"--resume finds no checkpoint in {args.work_dir}")
    return args, settings


def checkpoint_path(work_dir: Path) -> Path:
    """Return where the checkpoint of a training in `work_dir` lies."""
    return work_dir / "checkpoints" / "last.pt"


def main() -> None:
    """Train, export, evaluate what was stored, and write the model card."""
    args, settings = parse_args()
    out: Path = args.out or args.work_dir / "model"
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)

    corpus = load_corpus(settings.holdout_first, settings.holdout_last)
    chats = chat_examples(corpus.train)
    chat_texts = [message["content"] for chat in chats for message in chat]
    tokenizer = train_tokenizer([*corpus.train.values(), *chat_texts], settings.vocab_size)
    stream = encode_texts(tokenizer, corpus.train.values())
    heldout = encode_texts(tokenizer, corpus.heldout.values())
    chat_rows = [
        encode_texts(tokenizer, [str(tokenizer.apply_chat_template(chat, tokenize=False))])
        for chat in chats
    ]
    model = build_model(settings, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{parameters:,} parameters; {len(stream):,} training tokens, {len(chats)} chats, "
        f"{len(heldout):,} held-out tokens"
    )

    try:
        progress = train(
            model,
            stream,
            chat_rows,
            heldout,
            settings,
            checkpoint_path(args.work_dir),
            args.resume,
        )
    except KeyboardInterrupt:
        raise SystemExit("interrupted; --resume continues from the last checkpoint") from None

    export(model, tokenizer, out)
    stored = AutoModelForCausalLM.from_pretrained(out)
    stored_tokenizer = AutoTokenizer.from_pretrained(out)
    stored_loss = evaluate(stored, heldout)
    heldout_bytes = sum(len(text.encode()) for text in corpus.heldout.values())
    bits = stored_loss * (len(heldout) - 1) / math.log(2) / heldout_bytes
    results = {
        "Parameters": f"{parameters:,}",
        "Lowest held-out loss during training": f"{progress.best_loss:.4f} nats per token",
        "Held-out loss, kept 32-bit weights": f"{progress.kept_loss:.4f} nats per token",
        "Held-out loss, stored 16-bit weights": f"{stored_loss:.4f} nats per token",
        "Held-out perplexity, stored weights": f"{math.exp(stored_loss):.2f}",
        "Held-out bits per byte, stored weights": f"{bits:.3f}",
        "Weights kept from step": f"{progress.kept_step} of {progress.step} run",
        "Training time": f"{progress.seconds / 60:.1f} minutes on {args.threads} CPU threads",
        "Training tokens": f"{len(stream):,} in {len(corpus.train)} topics, and {len(chats)} chats",
        "Held-out tokens": f"{len(heldout):,} in {len(corpus.heldout)} topics: "
        + ", ".join(corpus.heldout),
        "Python (its `pydoc_data.topics`)": platform.python_version(),
        "SHA-256 of the topics": f"`{corpus.sha256}`",
        "PyTorch": torch.__version__,
        "Transformers": transformers.__version__,
        "Tokenizers": tokenizers.__version__,
    }
    options = {f"`--{name.replace('_', '-')}`": value for name, value in asdict(settings).items()}
    section = "\n\n".join(
        [
            "## Results",
            table("Result", results),
            "## Settings",
            table("Option", options),
            "## Samples",
            "Written by the stored model; sampled with its `generation_config.json`.",
            describe_samples(stored, stored_tokenizer, settings.seed),
        ]
    )
    write_card(out / "README.md", section)
    print(f"held-out loss {progress.kept_loss:.4f}, stored {stored_loss:.4f}; model in {out}")


if __name__ == "__main__":
    main()
