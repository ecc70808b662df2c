"""Figures that follow widgets in a live kernel, and are static everywhere else."""

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbook.lab.progress import headless
from workbook.runs import looks

WIDTH_PX = 960


def is_live() -> bool:
    """True if a person can move a widget: in a kernel that accepts input, as in JupyterLab or an
    editor, unlike papermill, nbclient and nbval. NSA_HEADLESS=1 makes it False."""
    if headless():
        return False
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        return False
    return bool(getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False))


@dataclass
class Panel:
    """Views of the same values: `views` {name: f(**values) -> a figure}, and below each figure the
    sentences of `told(**values)`.

    start: the initial values. controls: makes {name: widget} of them, called if widgets can be
    moved. adjust(widgets, name, value): called when one of them changes, to set others. foot: the
    control below the picture, as long as the picture's axis from `span[0]` to `span[1]`, shares of
    its width.
    """

    start: Mapping[str, Any]
    views: Mapping[str, Callable[..., Any]]
    told: Callable[..., Sequence[str]]
    controls: Callable[[Mapping[str, Any]], dict[str, Any]]
    adjust: Callable[[dict[str, Any], str, Any], None] = field(default=lambda *_: None)
    foot: str = ""
    span: tuple[float, float] = (0.0, 1.0)

    def show(self, run: Any = None, prefix: str = "") -> Any:
        """Return the widgets if they can be moved; else every view, one below the other, and the
        sentences. The views are figures of `run` (a `store.Run`), called prefix + name, either way.
        """
        from IPython.display import Image, display

        pictures = []
        for name, draw in self.views.items():
            figure = draw(**self.start)
            if run is not None:
                run.show(figure, prefix + name.replace(" ", "_"))
            pictures.append((name, png(figure)))
        if is_live():
            return LivePanel(self).widget
        told = list(self.told(**self.start))
        for name, picture in pictures:
            display(Image(picture, format="png", alt=". ".join([name, *told])))
        print(*told, sep="\n")
        return None


class LivePanel:
    """A panel's widgets. An error in drawing is shown above the picture, which stays."""

    def __init__(self, panel: Panel):
        import ipywidgets as widgets

        self.panel = panel
        self.controls = panel.controls(panel.start)
        self.view = widgets.ToggleButtons(options=list(panel.views))
        self.view.style.button_width = "auto"
        self.picture = widgets.Image(format="png", layout={"max_width": "100%"})
        self.message, self.words = widgets.HTML(), widgets.HTML()
        self._adjusting = False
        for name, control in self.controls.items():
            control.observe(lambda change, name=name: self._changed(name, change["new"]), "value")
        self.view.observe(lambda _: self.redraw(), "value")
        for part, name in ((self.picture, "picture"), (self.message, "message")):
            part.add_class(f"nsa-{name}")
        above = [w for name, w in self.controls.items() if name != panel.foot]
        row = widgets.HBox(above, layout={"flex_flow": "row wrap"})
        parts = [row, *([self.view] if len(panel.views) > 1 else []), self.message, self.picture]
        if panel.foot:
            begin, end = panel.span
            edges = {"padding": f"0 {100 * (1 - end):.2f}% 0 {100 * begin:.2f}%"}
            parts.append(widgets.Box([self.controls[panel.foot]], layout=edges))
        width = {"width": "100%", "max_width": f"{WIDTH_PX}px"}
        self.widget = widgets.VBox([*parts, self.words], layout=width)
        self.redraw()

    def values(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    def _changed(self, name: str, value: Any) -> None:
        if self._adjusting:
            return
        self._adjusting = True  # one movement makes one picture
        try:
            self.panel.adjust(self.controls, name, value)
        except ValueError as error:
            return self._tell(error)
        finally:
            self._adjusting = False
        self.redraw()

    def redraw(self) -> None:
        """Redraw the picture and the sentences for the current values."""
        values = self.values()
        try:
            picture = png(self.panel.views[self.view.value](**values))
            told = self.panel.told(**values)
        except ValueError as error:
            return self._tell(error)
        self.message.value = ""
        self.picture.value = picture
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in told)
        self.words.value = f'<div role="status" style="line-height: 1.5">{lines}</div>'

    def _tell(self, error: ValueError) -> None:
        look = f"color: {looks.RED}"
        self.message.value = f'<div role="alert" style="{look}">{html.escape(str(error))}</div>'


def png(figure: Any) -> bytes:
    """PNG of a figure, compressed for speed rather than size."""
    written = io.BytesIO()
    with looks.style():
        figure.savefig(written, format="png", dpi=100, pil_kwargs={"compress_level": 1})
    return written.getvalue()
