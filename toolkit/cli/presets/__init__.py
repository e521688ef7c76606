"""`python -m toolkit presets`: the tables of presets in a README."""
