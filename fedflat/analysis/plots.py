"""Figures of the results, with matplotlib, whose global state is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedflat.analysis.features import tsne
from fedflat.extras import blank_figure

if TYPE_CHECKING:
    from fedflat.analysis.calibration import Calibration
    from fedflat.analysis.clients import Clients
    from fedflat.analysis.connectivity import Connectivity
    from fedflat.analysis.curvature import Curvature
    from fedflat.analysis.density import Density
    from fedflat.analysis.layers import LayerTable
    from fedflat.analysis.noise import NoiseCurve
    from fedflat.analysis.pruning import PrunedFeatures
    from fedflat.analysis.rounds import AccuracyOverRounds
    from fedflat.analysis.signal import GradientSignal
    from fedflat.analysis.survey import Landscape

BLUE, RED, QUIET = "#0072b2", "#d55e00", "#5b6673"
SHOWN = 500  # samples in a picture by t-SNE
FLOOR = 1e-6  # densities below this are not drawn


def curvature_figure(result: Curvature) -> Any:
    """Eigenvalues by rank with their residuals, and the density if there is one."""
    figure = blank_figure(10 if result.density else 5, 4)
    axes = figure.subplots(1, 2 if result.density else 1, squeeze=False)[0]
    ranks = range(1, len(result.eigenvalues) + 1)
    axes[0].errorbar(ranks, result.eigenvalues.numpy(), result.residuals.numpy(), fmt="o", markersize=4, color=BLUE)
    axes[0].axhline(result.smallest, color=RED, linewidth=1, label=f"smallest: {result.smallest:.3g}")
    _dress(axes[0], "largest eigenvalues of the Hessian", "rank", "λ")
    axes[0].legend(frameon=False)
    if result.density:
        _draw_density(axes[1], result.density)
    return figure


def density_figure(result: Density) -> Any:
    """The smoothed density."""
    figure = blank_figure(6, 4)
    _draw_density(figure.subplots(), result)
    return figure


def _draw_density(axes: Any, result: Density) -> None:
    axes.semilogy(result.grid.numpy(), result.values.clamp_min(FLOOR).numpy(), color=BLUE, linewidth=1.2)
    axes.set_ylim(bottom=FLOOR)
    _dress(axes, "density of the eigenvalues", "λ", "density")


def layers_figure(result: LayerTable) -> Any:
    """Largest eigenvalue and input second moment of every layer, on one logarithmic axis."""
    figure = blank_figure(7, 1.5 + 0.3 * len(result.rows))
    axes = figure.subplots()
    places = range(len(result.rows))
    axes.plot([row.largest for row in result.rows], places, "o", color=BLUE, label="largest eigenvalue")
    axes.plot([row.input_moment for row in result.rows], places, "s", color=RED, label="mean square of the input")
    axes.set_yticks(list(places), [row.name for row in result.rows])
    axes.set_xscale("symlog", linthresh=1e-3)
    axes.invert_yaxis()
    _dress(axes, "curvature by layer", "", "")
    axes.legend(frameon=False)
    return figure


def landscape_figure(result: Landscape) -> Any:
    """Loss on the left and error on the right; of the test data where there are any."""
    figure = blank_figure(10, 4.2)
    error = result.error if result.test_error is None else result.test_error
    titles = "loss", "error" if result.test_error is None else "test error"
    for axes, values, title in zip(figure.subplots(1, 2), (result.loss, error), titles, strict=True):
        draw = _draw_line if len(result.axes) == 1 else _draw_map
        draw(figure, axes, result, values)
        _dress(axes, title, "first direction", "second direction" if len(result.axes) == 2 else "")
    return figure


def _draw_line(figure: Any, axes: Any, result: Landscape, values: Any) -> None:
    axes.plot(result.axes[0].numpy(), values.numpy(), color=BLUE)
    for name, (place,) in result.marks.items():
        axes.axvline(place, color=QUIET, linewidth=0.8, linestyle=":")
        axes.annotate(name, (place, 1), xycoords=("data", "axes fraction"), fontsize=8, color=QUIET, va="top")


def _draw_map(figure: Any, axes: Any, result: Landscape, values: Any) -> None:
    filled = axes.contourf(*(axis.numpy() for axis in result.axes), values.T.numpy(), levels=24, cmap="viridis")
    figure.colorbar(filled, ax=axes)
    for name, place in result.marks.items():
        axes.plot(*place, "o", color="white", markeredgecolor="black")
        axes.annotate(name, place, xytext=(4, 4), textcoords="offset points", fontsize=8, color="white")


def noise_figure(result: NoiseCurve) -> Any:
    """Mean loss and error with a band of one standard deviation."""
    figure = blank_figure(10, 4)
    pairs = ((result.loss, result.loss_deviation), (result.error, result.error_deviation))
    ratios = result.ratios.numpy()
    for axes, pair, title in zip(figure.subplots(1, 2), pairs, ("loss", "error"), strict=True):
        mean, deviation = (values.numpy() for values in pair)
        axes.plot(ratios, mean, color=BLUE)
        axes.fill_between(ratios, mean - deviation, mean + deviation, color=BLUE, alpha=0.2)
        _dress(axes, title, "‖noise‖ / ‖weights‖", "")
    return figure


def calibration_figure(result: Calibration) -> Any:
    """The reliability diagram."""
    figure = blank_figure(4.5, 4.2)
    axes = figure.subplots()
    bins = len(result.counts)
    edges = [i / bins for i in range(bins)]
    axes.bar(
        edges, result.accuracy.nan_to_num(0).tolist(), width=0.95 / bins, align="edge", color=BLUE, label="accuracy"
    )
    axes.plot([0, 1], [0, 1], color=QUIET, linestyle=":", label="perfect")
    _dress(axes, f"expected calibration error {result.error:.3f}", "confidence", "")
    axes.legend(frameon=False)
    return figure


def pruning_figure(result: PrunedFeatures) -> Any:
    """Features of the whole and of the two pruned models in two dimensions by t-SNE, coloured by class."""
    figure = blank_figure(11, 4)
    axes = figure.subplots(1, len(result.features), squeeze=False)[0]
    for place, (name, (rows, labels)) in zip(axes, result.features.items(), strict=True):
        points = tsne(rows[:SHOWN], perplexity=min(30.0, (len(rows[:SHOWN]) - 1) / 3))
        place.scatter(*points.T.numpy(), c=labels[:SHOWN].numpy(), cmap="tab10", s=6)
        place.set_xticks([])
        place.set_yticks([])
        _dress(place, f"{name}\nsilhouette {result.silhouettes[name]:.3f}", "", "")
    return figure


def signal_figure(result: GradientSignal) -> Any:
    """How many parameters have which r, on logarithmic axes."""
    figure = blank_figure(5, 4)
    axes = figure.subplots()
    ratios = result.ratio[result.ratio > 0].log10().tolist()
    axes.hist(ratios, bins=50, color=BLUE, log=True)
    _dress(axes, f"gradient signal, mean r {result.average:.3g}", "log10 r", "parameters")
    return figure


def connectivity_figure(result: Connectivity) -> Any:
    """The barriers between all pairs."""
    figure = blank_figure(5, 4.2)
    _draw_matrix(figure, figure.subplots(), result.barrier, "barrier between two models", range(len(result.barrier)))
    return figure


def clients_figure(result: Clients) -> Any:
    """Gradient signal at the first and the last local step, and the barriers between the models."""
    figure = blank_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    names = [str(client) for client in result.clients]
    for values, colour, label in ((result.first, BLUE, "first step"), (result.last, RED, "last step")):
        left.plot(names, values, "o", color=colour, label=label)
    left.legend(frameon=False)
    _dress(left, "gradient signal Σr", "client", "")
    _draw_matrix(figure, right, result.lines.barrier, "barrier between two clients", result.clients)
    return figure


def _draw_matrix(figure: Any, axes: Any, values: Tensor, title: str, names: Sequence[int]) -> None:
    top = float(values.max()) or 1.0  # a scale, too, where there is no barrier at all
    figure.colorbar(axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=top), ax=axes)
    axes.set_xticks(range(len(values)), list(map(str, names)))
    axes.set_yticks(range(len(values)), list(map(str, names)))
    _dress(axes, title, "", "")


def rounds_figure(result: AccuracyOverRounds) -> Any:
    """Accuracy on the common test data, and of every client at every evaluation."""
    figure = blank_figure(10 if result.rounds else 5, 4.2)
    axes = figure.subplots(1, 2 if result.rounds else 1, squeeze=False)[0]
    axes[0].plot([round for round, _ in result.curve], [value for _, value in result.curve], color=BLUE)
    _dress(axes[0], "accuracy", "round", "")
    if result.rounds:
        drawn = axes[1].imshow(result.by_client.T.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
        figure.colorbar(drawn, ax=axes[1])
        shown = range(0, len(result.rounds), -(-len(result.rounds) // 10))
        axes[1].set_xticks(list(shown), [str(result.rounds[place]) for place in shown])
        _dress(axes[1], "accuracy of the clients", "round", "client")
    return figure


def _dress(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x, color=QUIET, fontsize=9)
    axes.set_ylabel(y, color=QUIET, fontsize=9)
    axes.tick_params(length=0, labelsize=9, colors=QUIET)
    for spine in axes.spines.values():
        spine.set_visible(False)
