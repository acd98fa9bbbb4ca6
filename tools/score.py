"""The program txl-score of this clone: see txl_programs/score.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
