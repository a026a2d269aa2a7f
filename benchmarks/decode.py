"""Does a token cost more, the later it comes?

    python benchmarks/decode.py [--repeats 200] [--figure decode.png]

Times one decoding step of a Latte-R-SWA++ model after prompts of growing length. The state has the same size after each
of them, and the step should take the same time.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import tyro
from harness import best_times, machine, print_table

from latte_eqx import PAPER_ROWS, LanguageModel, prefill


@dataclass(frozen=True)
class Arguments:
    """Time a decoding step at several positions."""

    repeats: int = 200
    """Rounds; the best one counts."""
    positions: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    """How many tokens there are before the step."""
    figure: Path | None = None
    """Where to write the curve as a PNG."""


def main(arguments: Arguments) -> None:
    config = replace(PAPER_ROWS["latte_r_swa"], num_layers=2, dim=256, mlp_dim=1024, vocab_size=512)
    model = LanguageModel(config, key=jax.random.key(0))
    step = eqx.filter_jit(lambda model, token, state: jax.vmap(model.extend)(token, state))
    print(machine())

    runs, sizes = {}, set()
    for position in arguments.positions:
        tokens = jax.random.randint(jax.random.key(position), (1, position), 0, config.vocab_size)
        _, state = prefill(model, tokens)
        sizes.add(sum(x.nbytes for x in jax.tree.leaves(state)))
        runs[str(position)] = lambda state=state: step(model, jnp.zeros((1, 1), jnp.int32), state)
    times = best_times(runs, arguments.repeats)

    first = times[str(arguments.positions[0])]
    rows = [(name, f"{1e6 * seconds:.0f} us", f"{seconds / first:.3f}x") for name, seconds in times.items()]
    print_table("one decoding step", ("position", "time", f"against {arguments.positions[0]}"), rows)
    print(f"\nstate: {', '.join(f'{size / 2**10:.0f} KiB' for size in sizes)} at every position")
    if arguments.figure is not None:
        figure, axes = plt.subplots(layout="constrained")
        axes.plot(arguments.positions, [1e6 * seconds for seconds in times.values()], "o-", color="#b07d4f")
        axes.set(xscale="log", xlabel="position", ylabel="microseconds per token", ylim=(0, None))
        figure.savefig(arguments.figure, dpi=150)
        print(f"wrote {arguments.figure}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
