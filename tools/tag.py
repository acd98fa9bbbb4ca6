"""The program txl-tag of this clone: see txl_programs/tag.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
