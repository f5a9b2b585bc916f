"""What of PyTorch is not ours: its own tests and operators on both sides, and its new releases.

`tests`, `opinfo`            the two comparisons of stock and patched, by command
`sources`, `operators`       what they run: upstream's test files; operators' samples as tests
`sides`, `testpool`, `teststate`   the two Pythons, processes over GPUs, results that are kept
`comparison`, `differences`  what differs, and what is meant to
`gone_names`                 stands in for names that other releases' tests import
`pin_add`                    a new release: `release` gets it, `three_way` puts the patches on it,
                             `trial` judges them, `trial_report` says so, `new_pin` writes it
"""
