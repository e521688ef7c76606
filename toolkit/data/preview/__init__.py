"""What a run will make of its data, as plain values: of all rows, of a step, of one row. Nothing is printed here."""
