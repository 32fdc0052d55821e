"""One reader and writer for each kind of checkpoint. `registry` has a row of each."""
