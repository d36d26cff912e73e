"""A step's time-line as an SVG picture: stages as rows, time to the right.

Each stage has a band for what its device computes and, below it, a thin one for what its link carries. Operations are
coloured by forward, backward and weight gradient, in four shades by micro-batch, so that neighbours can be told apart;
further chunks of an interleaved schedule are darker. One class of replicas is shown: the last to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from flashrec.sim.operations import Op
from flashrec.sim.timeline import KINDS, Activity, Timeline

LEFT, RIGHT, TOP, BOTTOM = 74, 24, 92, 46
MIN_LABEL, LABEL_SIZE = 7.0, 11.0  # the narrowest box with a number; the largest letters
DENSE, EVERY = (
    14.0,
    8,
)  # where forwards are narrower than so many pixels, only every eighth micro-batch is numbered
LEGEND_LINE = 18
HUES = {  # hue and saturation: blue, orange and green differ in lightness too, for those who do not see colours
    "forward": (212, 72),
    "backward": (28, 88),
    "weight": (146, 46),
    "optimizer": (280, 32),
    "send_forward": (212, 40),
    "send_backward": (28, 50),
    "grad_sync": (342, 62),
    "tied_sync": (318, 45),
    "finish": (0, 52),
}
LIGHTNESS = {"forward": 58, "backward": 64, "weight": 44, "optimizer": 58}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight gradient",
    "optimizer": "optimizer",
    "send_forward": "activations sent",
    "send_backward": "gradients sent",
    "grad_sync": "gradient synchronisation",
    "tied_sync": "tied embeddings",
    "finish": "parameters gathered",
}
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths in pixels."""

    width: int
    band: float
    """Height of the computing band; the link's has a third of it."""
    gap: float

    @property
    def link(self) -> float:
        """Height of the link's band."""
        return max(3.0, self.band / 3)

    @property
    def row(self) -> float:
        """From one stage's top to the next's."""
        return self.band + self.link + 1 + self.gap

    @classmethod
    def of(cls, timeline: Timeline) -> Sizes:
        """Rows that get lower, and a picture that gets wider, the more there is to show."""
        stages, length = timeline.schedule.num_stages, len(timeline.schedule.ops[0])
        band = 24.0 if stages <= 8 else 16.0 if stages <= 24 else 9.0 if stages <= 64 else 5.0
        return cls(width=min(2400, max(1100, 14 * length)), band=band, gap=band / 3)


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """Where things are."""

    sizes: Sizes
    top: float
    scale: float
    """Pixels a second."""
    every: int
    """Micro-batches from one with a number to the next."""

    def x(self, seconds: float) -> float:
        """Pixels from the left."""
        return LEFT + seconds * self.scale

    def y(self, stage: int) -> float:
        """The upper edge of a stage's row."""
        return self.top + stage * self.sizes.row


def svg(timeline: Timeline, title: str = "") -> str:
    """The picture. Every activity of the class shown is one `rect` of class `op`, whose `title` tells its times."""
    sizes = Sizes.of(timeline)
    shown = _slowest(timeline)
    activities = [a for a in timeline.activity() if a.replica_class == shown]
    legend, lines = _legend(activities, timeline, sizes)
    scale = (sizes.width - LEFT - RIGHT) / timeline.batch_s if timeline.batch_s else 0.0
    widths = sorted(a.end - a.start for a in activities if a.kind == "forward")
    dense = bool(widths) and widths[len(widths) // 2] * scale < DENSE
    canvas = Canvas(
        sizes=sizes, top=TOP + (lines - 1) * LEGEND_LINE, scale=scale, every=EVERY if dense else 1
    )
    height = canvas.y(timeline.schedule.num_stages) + BOTTOM
    size = f"width='{sizes.width}' height='{height:.0f}'"
    box = f"viewBox='0 0 {sizes.width} {height:.0f}'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {box} {FONT}>",
        f"<rect {size} fill='#ffffff'/>",
        *_header(timeline, title, shown),
        *legend,
        *_rows(timeline, canvas),
        *_axis(timeline, canvas, height),
        *(line for activity in activities for line in _box(activity, canvas)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _slowest(timeline: Timeline) -> int:
    """The class of replicas whose operations end last."""
    return int(timeline.free.max(axis=0).argmax())


def _text(x: float, y: float, text: str, size: float = 12, extra: str = "fill='#222222'") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' {extra}>{escape(text)}</text>"


def _header(timeline: Timeline, title: str, shown: int) -> list[str]:
    schedule, classes = timeline.schedule, len(timeline.costs.weights)
    about = (
        f"{schedule.name}, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
        + (f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else "")
        + f"; step {seconds_text(timeline.batch_s)}, bubble {timeline.bubble():.1%}"
    )
    if classes > 1:
        weight = int(timeline.costs.weights[shown])
        about += f"; the last of {classes} classes of replicas to end ({weight} alike)"
    return [
        _text(LEFT, 24, title or "Time-line of one training step", 16, "font-weight='bold' fill='#111111'"),
        _text(LEFT, 44, about, 12, "fill='#555555'"),
    ]


def _legend(activities: Iterable[Activity], timeline: Timeline, sizes: Sizes) -> tuple[list[str], int]:
    """Of the kinds that the picture has; and how many lines it takes."""
    present = {activity.kind for activity in activities}
    x, line, parts = float(LEFT), 0, []
    for kind, name in NAMES.items():
        if kind not in present:
            continue
        if kind == "backward" and timeline.schedule.splits_backward:
            name = "input gradient"
        length = 19 + 6.8 * len(name) + 18
        if x + length > sizes.width - RIGHT:
            x, line = float(LEFT), line + 1
        y = 58 + line * LEGEND_LINE
        parts += [
            f"<rect x='{x:.1f}' y='{y}' width='14' height='12' rx='2' fill='{colour(kind, 0, 0)}'/>",
            _text(x + 19, y + 10, name, 11, "fill='#333333'"),
        ]
        x += length
    return parts, line + 1


def _axis(timeline: Timeline, canvas: Canvas, height: float) -> Iterator[str]:
    """Vertical lines at round times, and what they are."""
    bottom = height - BOTTOM + 4
    step = nice_step(timeline.batch_s, max(4, (canvas.sizes.width - LEFT - RIGHT) // 130))
    unit, factor = _unit(timeline.batch_s)
    count = int(timeline.batch_s / step + 1e-9) if step else 0
    for number in range(count + 1):
        x = canvas.x(number * step)
        yield (
            f"<line x1='{x:.1f}' y1='{canvas.top - 6:.1f}' x2='{x:.1f}' y2='{bottom:.1f}' "
            "stroke='#cccccc' stroke-width='1'/>"
        )
        label = f"{number * step * factor:.6g}"
        yield _text(x, bottom + 14, label, 11, "fill='#555555' text-anchor='middle'")
    yield _text(LEFT, bottom + 32, f"time ({unit})", 11, "fill='#555555'")


def _rows(timeline: Timeline, canvas: Canvas) -> Iterator[str]:
    """A grey band where a device is idle, and each stage's name; of many stages every few."""
    sizes, length = canvas.sizes, timeline.batch_s * canvas.scale
    every = max(1, math.ceil(12 / sizes.row))
    for stage in range(timeline.schedule.num_stages):
        y = canvas.y(stage)
        yield f"<rect x='{LEFT}' y='{y:.1f}' width='{length:.2f}' height='{sizes.band:g}' fill='#f0f0f0'/>"
        if stage % every == 0:
            size = min(12.0, max(8.0, sizes.band * 0.75))
            middle = y + sizes.band / 2 + size * 0.36
            yield _text(LEFT - 8, middle, f"stage {stage}", size, "fill='#333333' text-anchor='end'")


def _box(activity: Activity, canvas: Canvas) -> Iterator[str]:
    """The activity, and the number of its micro-batch where there is room for it."""
    sizes = canvas.sizes
    computes, is_operation = activity.kind in LIGHTNESS, activity.kind in KINDS.values()
    micro_batch, chunk = _numbers(activity) if is_operation else (0, 0)
    x, width = canvas.x(activity.start), (activity.end - activity.start) * canvas.scale
    y = canvas.y(activity.stage) + (0 if computes else sizes.band + 1)
    height = sizes.band if computes else sizes.link
    when = f"{seconds_text(activity.start)} to {seconds_text(activity.end)}"
    told = f"stage {activity.stage}: {NAMES[activity.kind]}, {activity.name}, {when}"
    edge = " stroke='#ffffff' stroke-width='0.5'" if width > 3 and computes else ""
    yield (
        f"<rect class='op' x='{x:.2f}' y='{y:.1f}' width='{width:.3f}' height='{height:.1f}' "
        f"fill='{colour(activity.kind, micro_batch, chunk)}'{edge}><title>{escape(told)}</title></rect>"
    )
    if is_operation and micro_batch % canvas.every == 0 and width >= MIN_LABEL:
        label = str(micro_batch)
        room = width if canvas.every > 1 else width - 2
        size = min(LABEL_SIZE, sizes.band * 0.62, room / (0.6 * len(label)))
        if size >= 7:
            fill = "#ffffff" if _lightness(activity.kind, micro_batch, chunk) < 56 else "#1a1a1a"
            at = y + sizes.band / 2 + size * 0.36
            yield _text(x + width / 2, at, label, size, f"fill='{fill}' text-anchor='middle'")


def _numbers(activity: Activity) -> tuple[int, int]:
    """Micro-batch and chunk of an operation's name."""
    op = Op.parse(activity.name)
    return op.micro_batch, op.chunk


def _lightness(kind: str, micro_batch: int, chunk: int) -> float:
    return max(22.0, LIGHTNESS.get(kind, 50) + 5 * (micro_batch % 4) - 10 * chunk)


def colour(kind: str, micro_batch: int, chunk: int) -> str:
    """The fill of an activity."""
    hue, saturation = HUES[kind]
    return f"hsl({hue}, {saturation}%, {_lightness(kind, micro_batch, chunk):g}%)"


def nice_step(length: float, count: int) -> float:
    """1, 2 or 5 times a power of ten, so that `length` has about `count` such steps."""
    if length <= 0:
        return 0.0
    rough = length / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * 0.999)


def _unit(length: float) -> tuple[str, float]:
    """The unit of a time-line so long, and how many of it are a second."""
    return ("s", 1.0) if length >= 2 else ("ms", 1e3) if length >= 2e-3 else ("µs", 1e6)


def seconds_text(seconds: float) -> str:
    """With a unit that suits it."""
    unit, factor = _unit(seconds)
    return f"{seconds * factor:.4g} {unit}"
