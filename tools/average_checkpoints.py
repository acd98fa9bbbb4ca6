"""The program txl-average-checkpoints of this clone: see txl_programs/average_checkpoints.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
