"""`tlt serve` with a trainer whose every candidate passes its trial.

Forced is the verdict alone: training, calibration, self-check, replay, offer, push and exchange are
the real ones. Two steps make a candidate, so that each differs a little from the one before. As a
program: `forced_adoptions.py serve FLAGS` is the server, otherwise its trainer.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from tlt_server import __main__, training

        training.TRAINER = (sys.executable, __file__, training.TRAINER[-1])
        sys.exit(__main__.main(sys.argv[1:]))

    from tlt_server.trainer.judging import adoption_test
    from tlt_server.trainer.process import main, schedule, trial

    schedule.FIRST_STEPS = schedule.MOST_STEPS = 2
    trial.FITTED = 2
    better = property(lambda test: test.groups > 0)
    adoption_test.AdoptionTest.better = better  # type: ignore[assignment,method-assign]
    sys.exit(main.main())
