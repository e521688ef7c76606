"""Ranks: how they meet, agree, draw random numbers, are stopped by signals, and end when one of them hangs."""
