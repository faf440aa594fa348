"""A search over LoRA adapters of one pretrained model, on this machine's cores.

    python examples/lora.py                    # 32 adapters of a small GPT-2, by ASHA
    python examples/lora.py --flow seer        # as many as a deadline and a budget allow
    python examples/lora.py --task classify    # a small BERT that sorts sentences

Nothing is downloaded: the "pretrained" model is a tiny one that is made and trained for a moment on
made-up sentences. ``--base`` takes the path or name of a real checkpoint, whose tokenizer then
makes the ids; write texts of your own in ``texts``. It takes about two minutes on two cores. Needs
the extra ``transformers``.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
import transformers
from optuna.samplers import TPESampler
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import dagsel
from dagsel.flows import ASHA, SEER
from dagsel.storage import ShardedDataset

WHO = ("the cat", "the dog", "a bird", "my friend", "the teacher", "a child")
DOES = {
    "likes": ("sees", "likes", "feeds", "hears"),
    "fears": ("fears", "flees", "avoids", "hides"),
}
WHAT = ("the ball", "the river", "a stone", "the moon", "bread", "the garden")
WORDS = sorted(
    {word for part in (*WHO, *DOES["likes"], *DOES["fears"], *WHAT) for word in part.split()}
)


def texts(n: int, *, style: str, seed: int) -> list[tuple[str, int]]:
    """Make sentences, each with 1 if nobody in it is afraid.

    In "general" ones everything follows everything; in "special" ones each subject has a verb and
    an object of its own, which an adapter can learn.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        likes = int(rng.integers(2))
        verbs = DOES["likes" if likes else "fears"]
        said = []
        for _ in range(rng.integers(1, 5)):
            who = int(rng.integers(len(WHO)))
            other = who if style == "special" else int(rng.integers(len(WHAT)))
            verb = verbs[who % 4 if style == "special" else int(rng.integers(4))]
            said.append(f"{WHO[who]} {verb} {WHAT[other]}")
        found.append((" ".join(said), likes))
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each word."""
    vocabulary = {token: at for at, token in enumerate(("[PAD]", "[UNK]", "[MASK]", *WORDS))}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


def pretrain(folder: Path, task: str, n_steps: int) -> None:
    """Train a tiny model for a moment and save it, as a stand-in for a real checkpoint."""
    torch.manual_seed(0)
    words = tokenizer()
    model: Any
    if task == "generate":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(words), n_positions=64, n_embd=64, n_layer=2, n_head=4,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    else:
        model = BertForMaskedLM(
            BertConfig(
                vocab_size=len(words), max_position_embeddings=64, hidden_size=64,
                num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            )
        )  # fmt: skip
    collate = DataCollatorForLanguageModeling(words, mlm=task != "generate")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(n_steps):
        sentences = [text for text, _ in texts(32, style="general", seed=step)]
        loss = model(**collate([words(text) for text in sentences])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    print(f"the base has a loss of {loss.item():.3f} after {n_steps} steps")


def classifier(base: str) -> Any:
    """Load a checkpoint with a new head, which transformers would report in each process."""
    transformers.logging.set_verbosity_error()
    return AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)


def adapter(config: Mapping[str, Any], base: Any, *, task: str) -> Any:
    """Build the adapter of a trial around the model that all trials share."""
    # The names are GPT-2's and BERT's; those of a Llama are "q_proj", "v_proj" and so on.
    targets = {"generate": ["c_attn"], "classify": ["query", "value"]}
    lora = LoraConfig(
        task_type={"generate": "CAUSAL_LM", "classify": "SEQ_CLS"}[task],
        r=config["r"],
        lora_alpha=config["alpha"] * config["r"],
        lora_dropout=config["dropout"],
        target_modules=targets[task],
        fan_in_fan_out=task == "generate",  # GPT-2's layers are transposed
    )
    return get_peft_model(base, lora)


def warmed(optimizer: Any, config: Mapping[str, Any]) -> Any:
    return transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=5)


def workload(base: str, words: Any, task: str) -> dagsel.HFWorkload:
    load: dict[str, Any] = {
        "generate": AutoModelForCausalLM.from_pretrained,
        "classify": classifier,
    }
    return dagsel.HFWorkload(
        model=partial(adapter, task=task),
        base=partial(load[task], base),
        optimizer=torch.optim.AdamW,
        batch_size=16,
        collator=words,
        metrics=["perplexity"] if task == "generate" else ["accuracy"],
        lr_scheduler=warmed,
        max_grad_norm=1.0,
    )


def space(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 3e-2, log=True),
        "r": trial.suggest_int("r", 1, 8, log=True),
        "alpha": trial.suggest_float("alpha", 0.5, 4.0, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a search over LoRA adapters")
    torch.set_num_threads(1)  # the model is tiny
    parser.add_argument("--task", choices=("generate", "classify"), default="generate")
    parser.add_argument("--flow", choices=("asha", "seer"), default="asha")
    parser.add_argument("--base", help="a checkpoint's folder or name; by default one is made")
    parser.add_argument("--trials", type=int, default=32, help="of ASHA")
    parser.add_argument("--epochs", type=int, default=9, help="at most, of ASHA")
    parser.add_argument("--deadline", default="90 s", help="of SEER")
    parser.add_argument("--budget", default="150 worker-s", help="of SEER")
    parser.add_argument("--sentences", type=int, default=800)
    parser.add_argument("--steps", type=int, default=150, help="of the base's training")
    args = parser.parse_args()

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or workers cannot be copies of this process
    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="dagsel-lora-"))
    base = args.base or str(folder / "base")
    if args.base is None:
        pretrain(folder / "base", args.task, args.steps)
    words = AutoTokenizer.from_pretrained(base)

    made = texts(args.sentences, style="special", seed=10**6)
    columns: dict[str, Any] = {"input_ids": [words(text)["input_ids"] for text, _ in made]}
    if args.task == "classify":
        columns["labels"] = [label for _, label in made]
    data = ShardedDataset.write(folder / "texts.zarr", columns, n_shards=4, validation=0.25)
    print(data)

    metric = "perplexity" if args.task == "generate" else "accuracy"
    flow = (
        ASHA(max_epochs=args.epochs, n_trials=args.trials)
        if args.flow == "asha"
        else SEER(deadline=args.deadline, budget=args.budget)
    )
    run = dagsel.optimize(
        optuna.create_study(
            study_name="lora",
            direction="minimize" if metric == "perplexity" else "maximize",
            sampler=TPESampler(seed=0),
        ),
        workload(base, words, args.task),
        data,
        space=space,
        metric=metric,
        flow=flow,
        run_dir=folder / "run",
    )
    print(run.leaderboard(8).to_string(index=False, float_format="{:.4g}".format))
    (best,) = run.export(folder / "best")
    print(f"best {metric} {run.best_value:.4f}; adapter saved in {best.removeprefix('file://')}")


if __name__ == "__main__":
    main()
