"""The program txl-serve of this clone: see txl_programs/server/serve.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
