"""The program txl-plot of this clone: see txl_programs/pictures/plot.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
