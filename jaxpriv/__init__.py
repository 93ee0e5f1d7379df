"""Pure functions on arrays for private language technology: no input or output, no model code."""
