"""The program txl-export-saved-model of this clone: see txl_programs/export_saved_model.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
