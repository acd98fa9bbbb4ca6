"""The program txl-generate of this clone: see txl_programs/generate.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
