"""The command line of both backends: options, overrides and configs. Imports `config`, `runs`, `formats`."""
