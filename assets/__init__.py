"""Files that ship with the program: the bundled model, calibration text and the stylesheet's data."""
