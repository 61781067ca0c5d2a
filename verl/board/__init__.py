"""What happened in a run: a store of its steps and samples, a page that shows it, comparisons.

    trainer --(batch, metrics)--> StoreWriter --(one thread)--> board.sqlite
                                                                     ^
                                         page, comparisons <-- StoreReader

`python -m verl.board FOLDER` serves the page; `--export FILE` writes it, data inside, to one file.
"""
