"""Generated parts of docs/: written from the tables that the code itself uses, so that both agree."""
