"""What a run folder shows to people: `report.html`, and the same facts as text."""
