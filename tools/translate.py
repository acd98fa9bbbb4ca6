"""The program txl-translate of this clone: see txl_programs/translate.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
