"""Ranks: how they meet, agree, draw random numbers, stop on a signal, and exit when one of them hangs."""
