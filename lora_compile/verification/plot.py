"""The picture of a verification: each token's log-probability, reference against product."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lora_compile.errors import FeatureUnsupported, InvalidValue
from lora_compile.verification.result import Result

FORMATS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Before hours of work: can this be drawn at all?

    Raises FeatureUnsupported (matplotlib is not installed) or InvalidValue (another format, or no
    such folder).
    """
    if path.suffix not in FORMATS or not path.parent.is_dir():
        raise InvalidValue(
            "the plot cannot be written there",
            expected=f"a file that ends in {' or '.join(FORMATS)}, in a folder that exists",
            found=str(path),
        )
    if find_spec("matplotlib") is None:
        raise FeatureUnsupported(
            "plots need the package matplotlib",
            expected="matplotlib",
            found="none",
            fix="pip install 'lora_compile[plot]', or leave --plot out",
        )


def draw(result: Result, path: Path) -> None:
    """One panel for base rows and for each adapter; one colour for each dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [run for run in (result.low, result.float32) if run is not None]
    names = result.float32.adapters
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(4.2 * len(names), 4.4), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        lowest = 0.0
        for run, colour, size in zip(
            runs, ("tab:orange", "tab:blue")[-len(runs) :], (14, 5), strict=False
        ):
            tokens = run.of(name)
            reference, product = tokens.reference.cpu().numpy(), tokens.product.cpu().numpy()
            lowest = min(lowest, float(reference.min()), float(product.min()))
            label = f"{run.dtype}: 0.5 mean Δ² {tokens.figures.half_mean_square:.1e}"
            axis.scatter(reference, product, s=size, color=colour, label=label, linewidths=0)
        axis.plot([lowest, 0], [lowest, 0], color="0.6", linewidth=0.8, zorder=0)
        axis.set_title(name or "base rows")
        axis.set_xlabel("log p, float32 reference (nats)")
        axis.legend(loc="upper left", fontsize=8)
    axes[0][0].set_ylabel("log p, product (nats)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
