"""The report of runs: one page that needs no network, from the files that runs leave."""
