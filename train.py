"""The program txl-train of this clone: see txl_programs/train.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
