"""The program txl-train-ner of this clone: see txl_programs/train_ner.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
