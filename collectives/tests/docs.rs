//! docs/algorithms.md has the same parameters, cost and use of each algorithm as
//! `gradwire algorithms`.

use std::{fs, path::Path};

use gradwire_collectives::{
    Algorithm,
    algorithms::{CHUNK, in_short},
};

fn document() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/algorithms.md");
    fs::read_to_string(path).expect("docs/algorithms.md")
}

#[test]
fn each_algorithm_has_its_rows() {
    let document = document();
    assert!(document.contains(&format!("`{}`", in_short(CHUNK.name, CHUNK.values))));
    for &algorithm in Algorithm::ALL {
        let about = algorithm.about();
        let parameters = algorithm.parameters().iter();
        let parameters: Vec<String> = parameters
            .map(|parameter| format!("`{}`", in_short(parameter.name, parameter.values)))
            .collect();
        let parameters = parameters.join("; ");
        let row = format!("| `{algorithm}` | {parameters} | {} | {} |", about.cost, about.when);
        assert!(document.lines().any(|line| line == row), "missing:\n{row}");
    }
}
