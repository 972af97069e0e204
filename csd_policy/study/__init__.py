"""Studies: what predicts where things are in a picture, and what an error costs there."""
