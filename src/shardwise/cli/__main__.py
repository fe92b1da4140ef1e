"""`python -m shardwise.cli`: the same as the `shardwise` command."""

from shardwise.cli import app

if __name__ == "__main__":
    app(prog_name="shardwise")
