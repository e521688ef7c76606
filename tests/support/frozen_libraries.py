"""Imported by the fork server after the libraries: what every rank would pay for, paid once.

A full collection of garbage in a rank would walk a million objects of torch and transformers, and copy their pages; matplotlib
loads fonts and measures its characters with the first picture.
"""

import gc
from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

figure = Figure(layout="constrained")
figure.add_subplot(title="0123456789")
FigureCanvasAgg(figure).print_png(BytesIO())
del figure
gc.collect()
gc.freeze()
