"""Plans: made once for a kind of call, kept in memory and on disk, run by one generated function."""
