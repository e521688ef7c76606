"""Imported by the fork server after the libraries: what every rank would pay for, paid once.

A full collection of garbage in a rank would walk a million objects of torch and transformers, and copy their pages; matplotlib
loads fonts and measures its characters with the first picture; bokeh makes its classes when it is imported, at the end of a
run, and looks at all their properties with the first chart; transformers compiles the patterns of all families' weight names.
"""

import gc
from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from toolkit.tools.report.charts import Chart, Curve, draw

get_checkpoint_conversion_mapping("t5")
figure = Figure(layout="constrained")
axes = figure.add_subplot(title="0123456789", yscale="log")
axes.plot([1, 2], [1, 30], marker="o", label="loss")
axes.legend()
figure.add_subplot(ylim=(0, 1e-5)).ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
FigureCanvasAgg(figure).print_png(BytesIO())
curve = Curve("loss", "#000000", [1, 2], [1.0, 30.0], has_points=True, is_noisy=True)
for is_log in (True, False):
    draw(Chart("Loss", "nats", [curve], is_log, (("checkpoint", (1,)),)))
del figure, axes, curve
gc.collect()
gc.freeze()
