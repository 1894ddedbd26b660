//! The documents have the same parameters, cost and use of each algorithm as
//! `gradwire algorithms`.

use std::{fs, path::Path};

use gradwire_collectives::{
    Algorithm,
    algorithms::{CHUNK, in_short},
};

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    fs::read_to_string(path).expect(name)
}

#[test]
fn each_algorithm_has_its_rows() {
    let (guide, costs) = (document("docs/algorithms.md"), document("lab/docs/costs.md"));
    assert!(costs.contains(&format!("`{}`", in_short(CHUNK.name, CHUNK.values))));
    for &algorithm in Algorithm::ALL {
        let about = algorithm.about();
        let parameters = algorithm.parameters().iter();
        let parameters: Vec<String> = parameters
            .map(|parameter| format!("`{}`", in_short(parameter.name, parameter.values)))
            .collect();
        let parameters = parameters.join("; ");
        for (document, row) in [
            (&guide, format!("| `{algorithm}` | {} |", about.when)),
            (&costs, format!("| `{algorithm}` | {parameters} | {} | {} |", about.cost, about.when)),
        ] {
            assert!(document.lines().any(|line| line == row), "missing:\n{row}");
        }
    }
}
