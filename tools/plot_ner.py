"""The program txl-plot-ner of this clone: see txl_programs/pictures/plot_ner.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
