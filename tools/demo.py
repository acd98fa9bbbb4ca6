"""The program txl-demo of this clone: see txl_programs/demo/demo.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
