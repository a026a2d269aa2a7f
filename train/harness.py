"""Language models measured by lm-eval, the harness of EleutherAI: its tasks ask, a `latte_eqx` model answers.

    python -m data.harness_tasks --blimp BLiMP.zip --piqa DIR --out TASKS
    python -m train.evaluate --harness blimp,piqa --tasks-dir TASKS --model data/models/stories260K/stories260K.bin

Needs the extra `harness`. Tasks are files of a directory, and nothing is downloaded.
"""

import contextlib
import importlib.metadata
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.tokenizer import AnyTokenizer
from latte_eqx import LanguageModel, generate
from train.restore import load_model
from train.scoring import Advance, Pair, Scorer, Tokens, batched

try:
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("Tasks of the harness need `lm-eval`: pip install 'latte-eqx[harness]'.") from error

MAX_NEW_TOKENS = 256
"""How much is written where a task does not say; that is what lm-eval has."""
LENGTH_NAMES = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
SETTING_NAMES = "until", "do_sample", "temperature", "top_k", "top_p", *LENGTH_NAMES


class Settings(NamedTuple):
    """How a continuation is written, and what ends it."""

    until: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None


class _AllDone(Exception):
    """Every text has come to its end, before the tokens have."""


class HarnessModel(LM):
    """A language model and its tokenizer, as lm-eval asks for them.

    **Arguments:**

    - `batch_size`: how many rows are read together at most.
    - `share_contexts`: whether a context with several continuations is read once, and they go on from its state; by
        default where states are small, see `MAX_STATE_BYTES`. The scores are the same.
    - `seed`: decides what is drawn where a task asks for samples.
    - `quiet`: show no progress.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: AnyTokenizer,
        *,
        batch_size: int = 32,
        share_contexts: bool | None = None,
        seed: int = 0,
        quiet: bool = False,
    ):
        super().__init__()
        # The model may be spread over devices; one of them is enough to answer.
        arrays, static = eqx.partition(model, eqx.is_array)
        self.model = eqx.combine(jax.device_put(arrays, jax.local_devices()[0]), static)
        self.tokenizer, self.seed, self.quiet = tokenizer, seed, quiet
        self.scorer = Scorer(self.model, batch_size=batch_size, share_contexts=share_contexts)
        first = tokenizer.encode("").tolist()
        self._adds_prefix = bool(first)
        self.prefix_token = first[0] if first else tokenizer.end_of_text

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval tells requests of different tokenizers apart by."""
        return self.tokenizer.name

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Encode both together, and split where the context alone would end.

        Blanks at the end of the context belong to the continuation; in the place of an empty context is the token that
        texts begin with, or, where there is none, the one they end with.
        """
        if not context:
            return Pair((self.prefix_token,), self._after_prefix(continuation))
        blanks = context[len(context.rstrip()) :]
        before = self._encode(context[: len(context) - len(blanks)])
        whole = self._encode(context + continuation)
        # Nothing but blanks is an empty context, unless the tokenizer puts something before it.
        return Pair(before, whole[len(before) :]) if before else Pair((self.prefix_token,), whole)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is the greedy one."""
        pairs = [self.encode_pair(*request.args) for request in requests]
        for pair, request in zip(pairs, requests, strict=True):
            if not pair.continuation:
                raise ValueError(f"A continuation must add a token to its context, got {request.args}.")
        with self._progress("scoring", len(pairs), disable_tqdm) as advance:
            return [(score.log_likelihood, score.is_greedy) for score in self.scorer(pairs, advance)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, every token of which is predicted once.

        A text that is longer than the model can read is cut into windows as lm-eval does; other models read it whole.
        The token before a text is never predicted itself.
        """
        pairs, owners = [], []
        for owner, request in enumerate(requests):
            windows = self._windows(self._after_prefix(request.args[0]))
            pairs += windows
            owners += [owner] * len(windows)
        totals = [0.0] * len(requests)
        with self._progress("scoring", len(pairs), disable_tqdm) as advance:
            for owner, score in zip(owners, self.scorer(pairs, advance), strict=True):
                totals[owner] += score.log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return how the model continues each context, up to the first of the strings that end it."""
        texts = [""] * len(requests)
        prompts = [self._encode(request.args[0]) or (self.prefix_token,) for request in requests]
        alike = defaultdict(list)
        for index, request in enumerate(requests):
            alike[read_settings(request.args[1])].append(index)
        key = jax.random.key(self.seed)
        with self._progress("writing", len(requests), disable_tqdm) as advance:
            for settings, indices in alike.items():
                for batch in batched(sorted(indices, key=lambda index: len(prompts[index])), self.scorer.batch_size):
                    key, batch_key = jax.random.split(key)
                    written = self._write([prompts[index] for index in batch], settings, batch_key)
                    for index, text in zip(batch, written, strict=True):
                        texts[index] = text
                    advance(len(batch))
        return texts

    def _encode(self, text: str) -> Tokens:
        tokens = tuple(self.tokenizer.encode(text).tolist())
        # A text that begins with the token already is not given it twice.
        is_double = self._adds_prefix and tokens[:2] == (self.prefix_token,) * 2
        return tokens[1:] if is_double else tokens

    def _after_prefix(self, text: str) -> Tokens:
        """Encode a text that follows the first token, which it may bring along."""
        tokens = tuple(self.tokenizer.encode_batch([text])[0].tolist())
        return tokens[1:] if tokens[:1] == (self.prefix_token,) else tokens

    def _windows(self, tokens: Tokens) -> list[Pair]:
        if not tokens:
            return []
        if self.scorer.max_length is None:
            return [Pair((self.prefix_token,), tokens)]
        windows = get_rolling_token_windows(list(tokens), self.prefix_token, self.scorer.max_length, 1)
        return [Pair(*map(tuple, make_disjoint_window(window))) for window in windows]

    def _write(self, prompts: Sequence[Tokens], settings: Settings, key: jax.Array) -> list[str]:
        if self.scorer.max_length is not None:
            room = self.scorer.max_length - settings.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"`max_gen_toks` must be less than {self.scorer.max_length}, which is what the model can read, "
                    f"got {settings.max_new_tokens}."
                )
            prompts = [prompt[-room:] for prompt in prompts]
        new, texts, is_done = [[] for _ in prompts], [""] * len(prompts), [False] * len(prompts)

        def take(drawn: np.ndarray) -> None:
            for place, token in enumerate(drawn.tolist()):
                if not is_done[place] and token != self.tokenizer.end_of_text:
                    new[place].append(token)
                    texts[place], is_done[place] = cut_off(self.tokenizer.decode(new[place]), settings.until)
            if all(is_done):
                raise _AllDone

        with contextlib.suppress(_AllDone):
            generate(
                self.model,
                list(prompts),
                max_new_tokens=settings.max_new_tokens,
                key=key,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                stop_token=self.tokenizer.end_of_text,
                on_token=take,
            )
        return texts

    @contextlib.contextmanager
    def _progress(self, what: str, total: int, is_off: bool) -> Iterator[Advance]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), disable=self.quiet or is_off) as bar:
            task = bar.add_task(what, total=total)
            yield lambda amount: bar.advance(task, amount)


def read_settings(arguments: Mapping[str, Any]) -> Settings:
    """Read what a task says of how to write. Without `do_sample` and a temperature the likeliest token is taken."""
    unknown = sorted(set(arguments) - set(SETTING_NAMES))
    if unknown:
        raise ValueError(f"Generation is set by {', '.join(SETTING_NAMES)}, got {', '.join(unknown)}.")
    until = arguments.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    max_new_tokens = next((arguments[name] for name in LENGTH_NAMES if arguments.get(name) is not None), MAX_NEW_TOKENS)
    if max_new_tokens < 1:
        raise ValueError(f"`max_gen_toks` must be positive, got {max_new_tokens}.")
    temperature, do_sample = arguments.get("temperature"), arguments.get("do_sample")
    if temperature is None:
        temperature = 1.0 if do_sample else 0.0
    if do_sample is False:
        temperature = 0.0
    # An empty string is found everywhere, and ends nothing.
    until = tuple(stop for stop in until if stop)
    return Settings(until, int(max_new_tokens), float(temperature), arguments.get("top_k"), arguments.get("top_p"))


def cut_off(text: str, until: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first of the strings that end it, and whether there was one."""
    found = [place for place in (text.find(stop) for stop in until) if place >= 0]
    return (text[: min(found)], True) if found else (text, False)


def measure_tasks(
    model: HarnessModel,
    names: Sequence[str],
    tasks_dir: Path,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task, and of each group of tasks; `examples` counts what they are the means of.

    `limit` takes the first so many examples of each task, `num_fewshot` puts so many solved ones before each.
    """
    # Both are read when `datasets` is imported, which comes next. Without the last, standard errors that are drawn
    # would be drawn in forks of this process, which JAX's threads do not survive.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_MULTIPROC"):
        os.environ.setdefault(name, "1")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    if limit is not None and limit < 1:
        raise ValueError(f"`--limit` must be positive, got {limit}.")
    if num_fewshot is not None and num_fewshot < 0:
        raise ValueError(f"`--num-fewshot` must not be negative, got {num_fewshot}.")
    if not tasks_dir.is_dir():
        raise FileNotFoundError(f"`--tasks-dir` must be a directory of task files, got {tasks_dir}.")
    manager = TaskManager(include_path=str(tasks_dir), include_defaults=False)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        there = ", ".join(manager.all_tasks) or "none"
        raise ValueError(f"Tasks must be of those in {tasks_dir}: {there}; got {', '.join(unknown) or 'none'}.")
    found: Any = simple_evaluate(
        model=model,
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        # Enough for the two digits of a standard error that are worth showing.
        bootstrap_iters=1000,
        log_samples=False,
    )
    of_task, of_group = found["n-samples"], found["group_subtasks"]
    count = lambda name: of_task[name]["effective"] if name in of_task else sum(map(count, of_group.get(name, ())))
    return {name: {**_metrics(values), "examples": count(name)} for name, values in found["results"].items()}


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Keep the numbers; a metric is called `acc,none` where no filter changed the answers."""
    is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    return {
        name.removesuffix(",none"): float(value) for name, value in values.items() if "," in name and is_number(value)
    }


def run_harness(
    names: Sequence[str],
    tasks_dir: Path,
    *,
    model: Path | None = None,
    workdir: Path | None = None,
    step: int | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    out: Path | None = None,
) -> None:
    """Measure a model on tasks, print a line for each metric, and write them to a file."""
    trained = load_model(model, workdir, step=step)
    answering = HarnessModel(trained.model, trained.tokenizer)
    start = time.perf_counter()
    metrics = measure_tasks(answering, names, tasks_dir, limit=limit, num_fewshot=num_fewshot)
    seconds = time.perf_counter() - start
    for name, values in metrics.items():
        for metric, value in values.items():
            if metric != "examples" and "_stderr" not in metric:
                print(f"{name}  {metric}  {value:.4f}{_error(values, metric)}  of {values['examples']:,}")
    print(f"{seconds:.1f} s")
    if out is not None:
        record = {
            "model": str(model or workdir),
            "step": step,
            "limit": limit,
            "num_fewshot": num_fewshot,
            "seconds": seconds,
            "versions": {name: importlib.metadata.version(name) for name in ("lm_eval", "jax")},
            "tasks": metrics,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=2) + "\n")


def _error(values: Mapping[str, float], metric: str) -> str:
    name, *filters = metric.split(",")
    error = values.get(",".join([f"{name}_stderr", *filters]))
    return "" if error is None else f" ± {error:.4f}"
