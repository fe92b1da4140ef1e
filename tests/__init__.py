"""The test suite: it mirrors ``src/shardwise`` path by path; ``tests.ranks`` runs functions on ranks."""
