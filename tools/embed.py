"""The program txl-embed of this clone: see txl_programs/embed.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
