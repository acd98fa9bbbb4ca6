"""The program txl-estimate of this clone: see txl_programs/estimate.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
