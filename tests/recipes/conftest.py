"""Of what a test of recipes computes itself: two threads spin while they wait for each other, where ranks want the cores."""

import torch

torch.set_num_threads(1)
