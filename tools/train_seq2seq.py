"""The program txl-train-seq2seq of this clone: see txl_programs/train_seq2seq.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
