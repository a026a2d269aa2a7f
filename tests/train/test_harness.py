"""What lm-eval is told: scores in batches and from shared states, against each text read by itself."""

import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from data.tokenizer import PretrainedTokenizer, load_tokenizer
from latte_eqx import LanguageModel, ModelConfig, generate
from latte_eqx.pretrained import load, to_macchiato
from tests.data.test_harness_tasks import GOALS, PAIRS, PASSAGES, write_all
from tests.train.test_main import arguments as run_arguments
from train import evaluate, harness, scoring
from train.harness import HarnessModel, cut_off, read_settings
from train.main import main as train
from train.restore import restore_run
from train.scoring import Pair, Scorer

STORIES = Path(__file__).parents[2] / "data" / "models" / "stories260K" / "stories260K.bin"
STORY = "Once upon a time, there was a little girl"
MAX_LENGTH = 512


@pytest.fixture(scope="module")
def pretrained():
    return load(STORIES)


@pytest.fixture(scope="module")
def tokenizer(pretrained):
    return PretrainedTokenizer("stories", pretrained.tokenizer)


@pytest.fixture(scope="module")
def models(pretrained):
    """With the new latents as they begin, every one of them would average the same."""
    longer = to_macchiato(pretrained.model, window=8, num_latents=16, p0=0.5)
    return {"full": pretrained.model, "macchiato": longer}


@pytest.fixture(params=["full", "macchiato"])
def model(models, request):
    return models[request.param]


def plain(model, pair):
    """Read the whole sequence by itself, unpadded."""
    tokens = [*pair[0], *pair[1]]
    logits = model(jnp.asarray(tokens[:-1]))
    scored, targets = slice(-len(pair[1]), None), np.array(pair[1])
    found = np.asarray(jax.nn.log_softmax(logits))[scored][np.arange(len(targets)), targets]
    return found.sum(dtype=np.float64), bool((np.asarray(logits)[scored].argmax(axis=-1) == targets).all())


def assert_scores(got, want):
    assert len(got) == len(want)
    np.testing.assert_allclose([score for score, _ in got], [score for score, _ in want], rtol=0, atol=1e-4)
    assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in want]


def draw(seed, *lengths):
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(3, 512, length).tolist()) for length in lengths]


def ask(*arguments):
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(arguments)]


LENGTHS = {1: (1, 70), 5: (13,), 16: (2, 18, 55), 17: (1, 17), 33: (1, 1, 38, 1), 70: (1, 1)}
"""Of each context, and of what follows it. Many sums are equal, since every length is compiled by itself."""


def drawn_pairs():
    """Return pairs in no order."""
    contexts = draw(0, *LENGTHS)
    lengths = [(context, length) for context in contexts for length in LENGTHS[len(context)]]
    pairs = [Pair(context, *draw(place, length)) for place, (context, length) in enumerate(lengths, 1)]
    return [pairs[place] for place in np.random.default_rng(1).permutation(len(pairs))]


@pytest.fixture(scope="module")
def wanted(models):
    return {name: [plain(model, pair) for pair in drawn_pairs()] for name, model in models.items()}


@pytest.mark.parametrize("name", ["full", "macchiato"])
@pytest.mark.parametrize("share_contexts", [True, False])
def test_scores_are_those_of_each_pair_alone(models, wanted, name, share_contexts):
    assert_scores(Scorer(models[name], batch_size=4, share_contexts=share_contexts)(drawn_pairs()), wanted[name])


@pytest.mark.parametrize("name", ["full", "macchiato"])
def test_pieces_and_small_batches_change_nothing(models, wanted, name, monkeypatch):
    """Rows that are longer than a piece go on from the state of the piece before, and few logits fit at once."""
    monkeypatch.setattr(scoring, "PIECE", 32)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 512 * 32 * 2)
    shapes, predict = set(), scoring._predict
    monkeypatch.setattr(scoring, "_predict", lambda *args: shapes.add(args[1].shape) or predict(*args))
    assert_scores(Scorer(models[name], batch_size=8)(drawn_pairs()), wanted[name])
    assert max(rows * length for rows, length in shapes) == 32 * 2


def test_a_shared_context_is_read_once(models, monkeypatch):
    read, extend = [], scoring._extend
    monkeypatch.setattr(
        scoring, "_extend", lambda *args: read.append(int(args[2].sum()) * args[1].shape[1]) or extend(*args)
    )
    context, other = draw(3, 57, 20)
    pairs = [Pair(context, (token,)) for token in (5, 6, 7, 8)] + [Pair(other, (9,))]
    Scorer(models["macchiato"])(pairs)
    assert sum(read) == 48
    Scorer(models["macchiato"], share_contexts=False)(pairs)
    assert sum(read) == 48


def test_large_states_are_not_kept(models, monkeypatch):
    assert Scorer(models["full"]).share_contexts
    monkeypatch.setattr(scoring, "MAX_STATE_BYTES", 1000)
    assert not Scorer(models["full"]).share_contexts


def test_few_programs_are_compiled(models, monkeypatch):
    shapes, predict = set(), scoring._predict
    monkeypatch.setattr(scoring, "_predict", lambda *args: shapes.add(args[1].shape) or predict(*args))
    Scorer(models["macchiato"], batch_size=8)([Pair((1,), tokens) for tokens in draw(0, *range(1, 64))])
    assert shapes == {(8, 64), (8, 32), (8, 16)}


def test_contexts_are_cut_on_the_left_where_attention_is_full(models):
    """With its continuation a context may be one longer than the model reads; another model reads all of it."""
    contexts, continuations = draw(5, 482, 483, 512, 513, 600), draw(6, 1, 31)
    pairs = [Pair(context, rest) for context in contexts for rest in continuations]
    cut = [((context + rest)[-(MAX_LENGTH + 1) :][: -len(rest)], rest) for context, rest in pairs]
    # Every length is compiled by itself.
    full = [(pair, short) for pair, short in zip(pairs, cut, strict=True) if sum(map(len, short)) == MAX_LENGTH + 1]
    assert [len(pair.context) for pair, _ in full] == [482, 483, 512, 512, 513, 513, 600, 600]
    scorer = Scorer(models["full"], batch_size=4)
    assert_scores(scorer([pair for pair, _ in full]), [plain(models["full"], short) for _, short in full])
    assert_scores(Scorer(models["macchiato"], batch_size=4)(pairs[-1:]), [plain(models["macchiato"], pairs[-1])])


@pytest.mark.parametrize("share_contexts", [True, False])
def test_padding_stays_within_what_the_model_reads(share_contexts):
    config = ModelConfig(
        mixer="attention", vocab_size=512, num_layers=1, dim=16, num_heads=2, mlp_dim=16, max_length=40
    )
    model = LanguageModel(config, key=jax.random.key(0))
    context, *continuations = draw(7, 30, 11, 11)
    pairs = [Pair(context, rest) for rest in continuations]
    got = Scorer(model, batch_size=2, share_contexts=share_contexts)(pairs)
    assert_scores(got, [plain(model, pair) for pair in pairs])


def test_greedy_is_what_the_model_would_write(model, tokenizer):
    asked = HarnessModel(model, tokenizer, quiet=True)
    prompt = tuple(tokenizer.encode(STORY).tolist())
    new = tuple(generate(model, prompt, max_new_tokens=12, key=jax.random.key(0), temperature=0).tolist())
    wrong_end = (*new[:-1], (new[-1] + 1) % 512)
    wrong_start = ((new[0] + 1) % 512, *new[1:])
    got = asked.scorer([Pair(prompt, new), Pair(prompt, wrong_end), Pair(prompt, wrong_start), Pair(prompt, new[:1])])
    assert [score.is_greedy for score in got] == [True, False, False, True]


class Theirs(TemplateLM):
    """How lm-eval itself splits texts into tokens, with an encoder in the place of transformers' tokenizer."""

    def __init__(self, encoder, prefix):
        super().__init__()
        self.encoder, self.prefix = encoder, prefix

    eot_token_id = property(lambda self: self.prefix)

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        starts = string.startswith(self.encoder.id_to_token(self.prefix))
        return self.encoder.encode(string, add_special_tokens=add_special_tokens is None and not starts).ids

    def _loglikelihood_tokens(self, requests, **kwargs):
        return [Pair(tuple(context), tuple(continuation)) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


TEXTS = [
    ("Once upon a time", ", there was a girl."),
    ("Once upon a time ", "there was"),
    ("The cat \n ", " sat"),
    ("", "Once upon"),
    ("", " Once upon"),
    ("", "<s>Once upon"),
    ("<s>Once", " upon"),
    ("Question: why?\nAnswer:", " no"),
    ("  ", "dog"),
    ("ca", "t"),
    ("caf", "é ☕"),
]


def test_texts_become_tokens_as_lm_eval_has_it(models, tokenizer):
    ours = HarnessModel(models["macchiato"], tokenizer, quiet=True)
    theirs = Theirs(tokenizer.encoder, 1).loglikelihood(ask(*TEXTS), disable_tqdm=True)
    assert [ours.encode_pair(*pair) for pair in TEXTS] == theirs


def test_without_a_first_token_the_end_of_text_is_before_a_text(models):
    gpt2 = load_tokenizer("gpt2")
    ours = HarnessModel(models["macchiato"], gpt2, quiet=True)
    word = tuple(gpt2.encode(" dog").tolist())
    assert ours.encode_pair("", " dog") == Pair((50256,), word)
    assert ours.encode_pair("A", " dog") == Pair(tuple(gpt2.encode("A").tolist()), word)
    assert ours.encode_pair(" ", "dog") == Pair((50256,), word)


def test_texts_are_scored(models, tokenizer):
    asked = HarnessModel(models["full"], tokenizer, batch_size=4, quiet=True)
    pairs = [pair for pair in TEXTS if pair != ("ca", "t")]
    want = [plain(models["full"], asked.encode_pair(*pair)) for pair in pairs]
    assert_scores(asked.loglikelihood(ask(*pairs)), want)
    # There is a token for both, and none for what the second adds.
    with pytest.raises(ValueError, match=r"must add a token to its context, got \('ca', 't'\)"):
        asked.loglikelihood(ask(("ca", "t")))


def test_rolling_predicts_every_token_once(models, tokenizer):
    """Full attention reads a long text in windows; the other model reads it whole, and nothing is forgotten."""
    texts = [f"{STORY} named Lily. She loved to play. " * 26, "A dog.", "", "<s>A dog."]
    requests = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)]
    tokens = tuple(tokenizer.encode(texts[0]).tolist())
    assert MAX_LENGTH < len(tokens) < 2 * MAX_LENGTH
    short = Pair((1,), tuple(tokenizer.encode("A dog.").tolist())[1:])
    # The first window ends with the token that is predicted last from it; the second ends with the text.
    first, rest = tokens[: MAX_LENGTH + 1], tokens[MAX_LENGTH + 1 :]
    windows = [(first[:1], first[1:]), ((first + rest)[-MAX_LENGTH - 1 : -len(rest)], rest)]
    wanted = {"full": windows, "macchiato": [(tokens[:1], tokens[1:])]}
    for name, model in models.items():
        got = HarnessModel(model, tokenizer, batch_size=2, quiet=True).loglikelihood_rolling(requests)
        dog = plain(model, short)[0]
        # The sum over a long text is in the thousands.
        assert got[0] == pytest.approx(sum(plain(model, pair)[0] for pair in wanted[name]), rel=1e-5)
        np.testing.assert_allclose(got[1:], [dog, 0, dog], rtol=0, atol=1e-4)


def written(model, tokenizer, *requests, **settings):
    made = [Instance("generate_until", {}, request, number) for number, request in enumerate(requests)]
    return HarnessModel(model, tokenizer, quiet=True, **settings).generate_until(made)


def test_it_writes_what_generate_writes(model, tokenizer):
    """Whatever else is written in the batch, and with which settings."""
    prompts = [STORY, "A dog", "", f"{STORY} named"]
    wanted = []
    for prompt in prompts:
        tokens = tokenizer.encode(prompt)
        new = generate(model, tokens, max_new_tokens=14, key=jax.random.key(0), temperature=0)
        wanted.append(tokenizer.decode(new))
    settings = {"until": [], "max_gen_toks": 14, "do_sample": False, "temperature": 0.7}
    got = written(model, tokenizer, *((prompt, settings) for prompt in prompts), batch_size=3)
    assert got == wanted
    assert len(set(got)) == 4
    cut = {"until": ["play", " She"], "max_gen_toks": 14}
    assert written(model, tokenizer, (STORY, cut), ("A dog", settings)) == [wanted[0].split(" She")[0], wanted[1]]


def test_writing_ends_when_all_texts_have(models, tokenizer, monkeypatch):
    steps = []

    def count(*args, on_token, **kwargs):
        return generate(*args, on_token=lambda token: steps.append(token) or on_token(token), **kwargs)

    monkeypatch.setattr(harness, "generate", count)
    got = written(models["full"], tokenizer, (STORY, {"until": " She", "max_gen_toks": 100}))
    assert got == ["named Lily."]
    assert len(steps) < 12


def test_the_end_of_text_ends_a_text(models, tokenizer):
    class EndsWithAStop(PretrainedTokenizer):
        end_of_text = property(lambda self: self.encoder.encode(".").ids[-1])

    ending = EndsWithAStop("stories", tokenizer.encoder)
    got = written(models["full"], ending, (STORY, {"until": [], "max_gen_toks": 20}))
    assert got == ["named Lily"]


def test_samples_are_drawn_by_the_seed(models, tokenizer):
    request = ("A dog", {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.0})
    first, second = written(models["full"], tokenizer, request, request)
    assert first != second
    assert written(models["full"], tokenizer, request, request) == [first, second]
    assert written(models["full"], tokenizer, request, request, seed=1) != [first, second]


def test_long_prompts_leave_room_to_write(models, tokenizer):
    prompt = f"{STORY} named Lily. " * 40
    got = written(models["full"], tokenizer, (prompt, {"until": [], "max_gen_toks": 12}))
    tokens = tokenizer.encode(prompt)[-(MAX_LENGTH - 12) :]
    new = generate(models["full"], tokens, max_new_tokens=12, key=jax.random.key(0), temperature=0)
    assert got == [tokenizer.decode(new)]
    with pytest.raises(ValueError, match=r"`max_gen_toks` must be less than 512, .* got 512"):
        written(models["full"], tokenizer, ("A dog", {"max_gen_toks": 512}))


@pytest.mark.parametrize(
    ("arguments", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.8}, 0.8),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.8}, 0.0),
        ({"do_sample": True, "temperature": 0.3}, 0.3),
    ],
)
def test_how_greedy_a_request_is(arguments, temperature):
    assert read_settings(arguments).temperature == temperature


def test_the_first_of_the_strings_ends_a_text():
    assert cut_off("one two three", ["three", "two", "four"]) == ("one ", True)
    assert cut_off("one two", ["three"]) == ("one two", False)


def test_settings_have_several_names():
    assert read_settings({"max_new_tokens": 7, "until": "\n"})[:2] == (("\n",), 7)
    assert read_settings({"max_gen_toks": 3, "max_tokens": 9, "until": ["a", ""]})[:2] == (("a",), 3)
    assert read_settings({})[:2] == ((), 256)


def test_wrong_requests_are_refused(models, tokenizer):
    asked = HarnessModel(models["full"], tokenizer, quiet=True)
    with pytest.raises(ValueError, match="must add a token to its context"):
        asked.loglikelihood(ask(("Once", "")))
    with pytest.raises(ValueError, match="must hold a token each"):
        asked.scorer([Pair((), (3,))])
    with pytest.raises(ValueError, match=r"must lie in \[0, 512\), .*, got 512"):
        asked.scorer([Pair((1,), (512,))])
    with pytest.raises(ValueError, match=r"at most 512 tokens, .*, got 513"):
        asked.scorer([Pair((1,), (5,) * 513)])
    with pytest.raises(ValueError, match=r"Generation is set by until, .*, got num_beams"):
        read_settings({"num_beams": 4, "until": []})
    with pytest.raises(ValueError, match="`max_gen_toks` must be positive, got 0"):
        read_settings({"max_gen_toks": 0})
    with pytest.raises(ValueError, match="`batch_size` must be positive"):
        Scorer(models["full"], batch_size=0)


def likelier_first(model, asked, context, texts):
    scores = [plain(model, asked.encode_pair(context, text))[0] for text in texts]
    return int(np.argmax(scores) == 0)


@pytest.fixture
def tasks(tmp_path):
    return write_all(tmp_path)


def test_tasks_are_measured(tasks, models, tokenizer, tmp_path, capsys):
    """All three, from their files to the accuracies, against texts that are read one by one."""
    out = tmp_path / "made" / "results.json"
    evaluate.main(evaluate.Arguments(harness="blimp, piqa,lambada", tasks_dir=tasks, model=STORIES, limit=3, out=out))
    record = json.loads(out.read_text())
    got, model = record["tasks"], models["full"]
    asked = HarnessModel(model, tokenizer, quiet=True)
    assert set(got) == {"blimp", "blimp_wh_island", "blimp_passive_1", "piqa", "lambada"}
    accuracies = {
        name: np.mean([likelier_first(model, asked, "", (f" {good}", f" {bad}")) for good, bad in pairs])
        for name, pairs in PAIRS.items()
    }
    for name, accuracy in accuracies.items():
        assert got[f"blimp_{name}"]["acc"] == accuracy
    assert got["blimp"]["acc"] == pytest.approx(np.mean(list(accuracies.values())))
    assert got["blimp"]["examples"] == 4
    chosen = [
        1 - likelier_first(model, asked, f"Question: {goal}\nAnswer:", (f" {first}", f" {second}"))
        for goal, first, second, _ in GOALS
    ]
    assert got["piqa"]["acc"] == np.mean([label == choice for choice, (*_, label) in zip(chosen, GOALS, strict=True)])
    words = [text.rsplit(" ", 1) for text in PASSAGES[:3]]
    losses = [-plain(model, asked.encode_pair(before, f" {last}"))[0] for before, last in words]
    assert got["lambada"]["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert record["limit"] == got["piqa"]["examples"] == got["lambada"]["examples"] == 3
    shown = capsys.readouterr().out
    assert f"piqa  acc  {got['piqa']['acc']:.4f} ± " in shown
    assert f"blimp  acc  {got['blimp']['acc']:.4f}" in shown


def test_solved_examples_come_first(tasks, models, tokenizer, monkeypatch):
    contexts, score = [], HarnessModel.loglikelihood
    monkeypatch.setattr(
        HarnessModel,
        "loglikelihood",
        lambda self, asked: contexts.extend(r.args[0] for r in asked) or score(self, asked),
    )
    model = HarnessModel(models["full"], tokenizer, quiet=True)
    harness.measure_tasks(model, ["piqa"], tasks, num_fewshot=1)
    assert len(contexts) == 2 * len(GOALS)
    for context, (goal, *_) in zip(contexts[::2], GOALS, strict=True):
        assert context.count("Question:") == 2
        assert context.endswith(f"Question: {goal}\nAnswer:")


def test_a_run_is_measured(tasks, tmp_path, capsys):
    train(run_arguments(tmp_path / "run", steps=2))
    capsys.readouterr()
    evaluate.main(evaluate.Arguments(harness="lambada", tasks_dir=tasks, workdir=tmp_path / "run"))
    run = restore_run(tmp_path / "run")
    model, tokenizer = run.trainer.language_model(run.state), load_tokenizer(run.tokenizer)
    words = [text.rsplit(" ", 1) for text in PASSAGES]
    pairs = [(tokenizer.encode(before).tolist(), tokenizer.encode(f" {last}").tolist()) for before, last in words]
    perplexity = np.exp(-np.mean([plain(model, pair)[0] for pair in pairs]))
    shown = next(line for line in capsys.readouterr().out.splitlines() if "lambada  perplexity" in line)
    assert float(shown.split()[2]) == pytest.approx(perplexity, rel=1e-4)


def test_unknown_tasks_are_refused(tasks, models, tokenizer, tmp_path):
    model = HarnessModel(models["full"], tokenizer, quiet=True)
    with pytest.raises(ValueError, match=r"must be of those in .*: blimp, .*, lambada, piqa; got hellaswag\."):
        harness.measure_tasks(model, ["piqa", "hellaswag"], tasks)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r": none; got piqa\."):
        harness.measure_tasks(model, ["piqa"], tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"`--tasks-dir` must be a directory of task files, got .*nowhere"):
        harness.measure_tasks(model, ["piqa"], tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Without `--harness` there must be `--workdir`, .*, got no `--workdir`"),
        ({"workdir": Path("x"), "limit": 3}, "Without `--harness` .*, got `--limit`"),
        ({"workdir": Path("x"), "model": STORIES, "out": Path("y")}, "Without `--harness` .*, got `--model`, `--out`"),
        (
            {"harness": "piqa", "model": STORIES},
            "With `--harness` there must be `--tasks-dir`, .*, got no `--tasks-dir`",
        ),
        ({"harness": "a", "tasks_dir": Path("x"), "every_checkpoint": True}, "With .*, got `--every-checkpoint`"),
        ({"harness": "a", "tasks_dir": Path("x"), "split": "test"}, "With .*, got `--split`"),
        ({"harness": "a", "tasks_dir": Path("x"), "seq": 64}, "With .*, got `--seq`"),
        ({"workdir": Path("x"), "step": 40, "every_checkpoint": True}, "must come without `--step`"),
        ({"workdir": Path("x"), "seq": 0}, "`--seq` must be positive"),
        ({"workdir": Path("x"), "seq": 9, "batch": Path("y")}, "`--seq` must .* come without `--batch`"),
    ],
)
def test_arguments_must_belong_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate.Arguments(**arguments)


@pytest.mark.parametrize("given", [{}, {"model": STORIES, "workdir": Path("x")}])
def test_there_must_be_one_model(given, tasks):
    with pytest.raises(ValueError, match="Either `--workdir` or `--model` must be given"):
        evaluate.main(evaluate.Arguments(harness="piqa", tasks_dir=tasks, **given))


def test_a_pretrained_model_has_no_steps(tasks):
    with pytest.raises(ValueError, match="`--step` must come with `--workdir`"):
        evaluate.main(evaluate.Arguments(harness="piqa", tasks_dir=tasks, model=STORIES, step=3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit": 0}, "`--limit` must be positive, got 0"),
        ({"num_fewshot": -1}, "`--num-fewshot` must not be negative"),
    ],
)
def test_numbers_of_examples_are_checked(tasks, models, tokenizer, wrong, message):
    with pytest.raises(ValueError, match=message):
        harness.measure_tasks(HarnessModel(models["full"], tokenizer, quiet=True), ["piqa"], tasks, **wrong)


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match=r"pip install 'latte-eqx\[harness\]'"):
        runpy.run_path(harness.__file__)
