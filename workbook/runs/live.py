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


class Kept:
    """A figure that is kept from picture to picture, so that only what changes is drawn.

    `layers` are lists of artists, drawn in this order over all others. move(...) sets them, and
    returns what the others and each layer but the last depend on, to be compared with ==: what lies
    below the first that changed is copied from the picture before.
    """

    def __init__(self, figure: Any, layers: Sequence[Sequence[Any]], move: Callable[..., tuple]):
        self.figure, self.layers, self.move = figure, layers, move
        self._canvas: Any = None
        self._below: list[tuple[Any, Any]] = []  # what each depends on, and the pixels with it
        self._png = b""

    def fed(self, by: Callable[..., Sequence[Any]]) -> "Kept":
        """Return the figure with a `move` of other values: those of which `by` makes its own."""
        return Kept(self.figure, self.layers, lambda **values: self.move(*by(**values)))

    def png(self, **values: Any) -> bytes:
        """PNG of the figure, moved to these values."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        with looks.style():
            keys = self.move(**values)
            if self._canvas is None:
                self._canvas = FigureCanvasAgg(self.figure)
                for artist in (each for layer in self.layers for each in layer):
                    artist.set_animated(True)
            alike = [old == new for (old, _), new in zip(self._below, keys, strict=False)]
            same = [*alike, False].index(False)
            if same and same == len(keys) > len(self.layers):
                return self._png
            del self._below[same:]
            if same:
                self._canvas.restore_region(self._below[-1][1])
            for level in range(same, len(self.layers) + 1):
                self._draw(level)
                if level < len(keys):
                    pixels = self._canvas.copy_from_bbox(self.figure.bbox)
                    self._below.append((keys[level], pixels))
        self._png = _encoded(self._canvas.buffer_rgba())
        return self._png

    def _draw(self, level: int) -> None:
        if level == 0:
            self._canvas.draw()
            return
        for artist in self.layers[level - 1]:
            self.figure.draw_artist(artist)


@dataclass(frozen=True)
class Grip:
    """Part of a view's picture on which its foot control is dragged: the sides as shares of the
    picture's width and height, from its upper left corner. Along a `vertical` one values grow
    downwards."""

    left: float
    right: float
    top: float
    bottom: float
    vertical: bool = False


@dataclass
class Panel:
    """Views of the same values: `views` {name: f(**values) -> a figure}, `kept` {name: f() -> a
    Kept whose `move` takes the values}, and below each figure the sentences of `told(**values)`.

    start: the initial values. controls: makes {name: widget} of them, called if widgets can be
    moved. adjust(widgets, name, value): called when one of them changes, to set others. foot: the
    control below the picture, as long as the picture's axis from `span[0]` to `span[1]`, shares of
    its width; it counts from 0. grips: by view, where it is dragged on the picture itself.
    """

    start: Mapping[str, Any]
    views: Mapping[str, Callable[..., Any]]
    told: Callable[..., Sequence[str]]
    controls: Callable[[Mapping[str, Any]], dict[str, Any]]
    adjust: Callable[[dict[str, Any], str, Any], None] = field(default=lambda *_: None)
    foot: str = ""
    span: tuple[float, float] = (0.0, 1.0)
    kept: Mapping[str, Callable[[], Kept]] = field(default_factory=dict)
    grips: Mapping[str, Grip] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Figures of all views at the initial values."""
        found = {name: draw(**self.start) for name, draw in self.views.items()}
        for name, make in self.kept.items():
            made = make()
            with looks.style():
                made.move(**self.start)
            found[name] = made.figure
        return found

    def show(self, run: Any = None, prefix: str = "") -> Any:
        """Return the widgets if they can be moved; else every view, one below the other, and the
        sentences. The views are figures of `run` (a `store.Run`), called prefix + name, either way.
        """
        from IPython.display import Image, display

        pictures = []
        for name, figure in self.figures().items():
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


# A grip is a slider that covers its part of the picture: its handle is a band along the line that
# is drawn there, to be taken hold of, and a click beside it moves it there.
GRIP_STYLE = """<style>
.nsa-held { position: relative; }
.nsa-grip, .nsa-grip .slider-container, .nsa-grip .noUi-target {
  position: absolute; inset: 0; width: auto; height: auto; margin: 0; }
.nsa-grip .noUi-target { opacity: 0; border: 0; background: none; }
.nsa-grip.widget-vslider .noUi-origin { width: 100%; }
.nsa-grip.widget-vslider .noUi-handle { left: 0; right: 0; width: 100%; height: 48px;
  bottom: -24px; top: auto; cursor: row-resize; }
.nsa-grip.widget-hslider .noUi-handle { top: 0; height: 100%; width: 48px; right: -24px;
  left: auto; cursor: col-resize; }
</style>"""


class LivePanel:
    """A panel's widgets. An error in drawing is shown above the picture, which stays."""

    def __init__(self, panel: Panel):
        import ipywidgets as widgets

        self.panel = panel
        self.controls = panel.controls(panel.start)
        self.kept = {name: make() for name, make in panel.kept.items()}
        self.view = widgets.ToggleButtons(options=[*panel.views, *panel.kept])
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
        self.grips = {name: self._grip(each) for name, each in panel.grips.items()}
        held = widgets.Box([self.picture, *self.grips.values()], layout={"overflow": "visible"})
        held.add_class("nsa-held")
        several = [self.view] if len(self.view.options) > 1 else []
        style = [widgets.HTML(GRIP_STYLE, layout={"display": "none"})] if self.grips else []
        parts = [*style, row, *several, self.message, held]
        if panel.foot:
            begin, end = panel.span
            edges = {"padding": f"0 {100 * (1 - end):.2f}% 0 {100 * begin:.2f}%"}
            parts.append(widgets.Box([self.controls[panel.foot]], layout=edges))
        width = {"width": "100%", "max_width": f"{WIDTH_PX}px"}
        self.widget = widgets.VBox([*parts, self.words], layout=width)
        self.redraw()

    def _grip(self, where: Grip):
        """Slider that covers part of the picture, and says and follows what the foot control is."""
        import ipywidgets as widgets

        foot, way = self.controls[self.panel.foot], "vertical" if where.vertical else "horizontal"
        made = widgets.IntSlider(
            min=0, max=foot.max, orientation=way, readout=False,
            layout={"left": f"{100 * where.left:.2f}%", "right": f"{100 * (1 - where.right):.2f}%",
                    "top": f"{100 * where.top:.2f}%",
                    "bottom": f"{100 * (1 - where.bottom):.2f}%"},
        )  # fmt: skip
        made.add_class("nsa-grip")

        def turned(value: int) -> int:
            return foot.max - value if where.vertical else value

        def follow(_: Any = None) -> None:
            with made.hold_sync():
                made.max = foot.max
                made.value = turned(foot.value)

        def lead(change: Mapping[str, Any]) -> None:
            if not self._adjusting and made.max == foot.max:
                foot.value = turned(change["new"])

        follow()
        foot.observe(follow, ["value", "max"])
        made.observe(lead, "value")
        return made

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
            name = self.view.value
            kept = self.kept.get(name)
            draw = kept.png if kept else lambda **given: png(self.panel.views[name](**given))
            picture = draw(**values)
            told = self.panel.told(**values)
        except ValueError as error:
            return self._tell(error)
        for each, grip in self.grips.items():
            grip.layout.display = None if each == name else "none"
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


def _encoded(pixels: Any) -> bytes:
    """PNG of [H, W, 4] uint8 of which no pixel is seen through, compressed for speed."""
    from PIL import Image

    height, width, _ = pixels.shape
    written = io.BytesIO()
    picture = Image.frombuffer("RGBA", (width, height), pixels, "raw", "RGBA", 0, 1)
    picture.convert("RGB").save(written, "png", compress_level=1)
    return written.getvalue()
