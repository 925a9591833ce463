"""Plans: created once per kind of call, stored in memory and on disk, run as one generated function."""
