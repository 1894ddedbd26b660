//! Grids of given sizes: proven for every number of nodes, in two dimensions and in as many as it
//! has prime factors.

use crate::*;

/// All ways to write a number as the product of two that are not 1.
fn in_two(nodes: u32) -> Vec<String> {
    let pairs = (2..nodes).filter(|side| nodes.is_multiple_of(*side));
    pairs.map(|side| format!("{side}x{}", nodes / side)).collect()
}

/// Its prime factors, from the smallest; none if it is prime itself.
fn in_most(mut nodes: u32) -> Option<String> {
    let mut factors = Vec::new();
    while nodes > 1 {
        let factor = (2..=nodes).find(|factor| nodes.is_multiple_of(*factor))?;
        factors.push(factor.to_string());
        nodes /= factor;
    }
    (factors.len() > 1).then(|| factors.join("x"))
}

/// The specs of all grids of a number of nodes.
fn grids(nodes: u32) -> Vec<Spec> {
    let two = in_two(nodes);
    let most = in_most(nodes);
    let with = |form: &str, dims: &str| Spec::parse(&form.replace("DIMS", dims)).unwrap();
    let of_two = ["torus(dims=DIMS)", "mesh(dims=DIMS)", "hips(dims=DIMS)"];
    let of_most = ["blueconnect(dims=DIMS)", "hips(dims=DIMS)", "hips(along=ring,dims=DIMS)"];
    let of_two = of_two.iter().flat_map(|form| two.iter().map(|dims| with(form, dims)));
    let of_most = of_most.iter().flat_map(|form| most.iter().map(|dims| with(form, dims)));
    of_two.chain(of_most).collect()
}

/// ONE, SAME, WAIT: all grids up to 64 nodes, and each number of dimensions above. In most layouts
/// the racks are not the rows.
#[test]
fn grids_of_all_sizes_are_proven() {
    let mut proofs = Proofs::default();
    for nodes in 4..=130u32 {
        let layouts = layouts(nodes);
        for (place, spec) in grids(nodes).into_iter().enumerate() {
            let turn = place + nodes as usize;
            let topology = &layouts[turn % layouts.len()];
            assert_eq!(spec.fits(nodes), Ok(()));
            if nodes > FULL && !turn.is_multiple_of(4) && !spec.to_string().contains("x2x") {
                continue;
            }
            let count = COUNTS[turn % COUNTS.len()];
            proofs.prove(Kind::Allreduce, spec, topology, count);
            if spec.algorithm() == Algorithm::Mesh {
                let root = nodes / 3;
                let kinds = [Kind::Broadcast { root }, Kind::Reduce { root }];
                proofs.prove(kinds[turn % 2], spec, topology, 1001);
            }
        }
    }
}

/// Any number of factors: a chain of 2(p−1) messages along each dimension by rings, of two by
/// direct exchange, and no participant sends more than the minimum.
#[test]
fn grids_have_any_number_of_dimensions() {
    for (dims, rings) in [("2x2x2x2x2", 10), ("2x3x2x5", 16), ("2x2x2x2x2x2x2", 14)] {
        let sizes: Vec<u32> = dims.split('x').map(|size| size.parse().unwrap()).collect();
        let nodes: u32 = sizes.iter().product();
        let count = 64 * u64::from(nodes);
        for (form, chain) in [("blueconnect", rings), ("hips", 2 * sizes.len() as u64)] {
            let spec = Spec::parse(&format!("{form}(dims={dims})")).unwrap();
            let report = prove(Kind::Allreduce, spec, &Topology::flat(nodes), count);
            assert_eq!(report.longest_chain, chain, "{spec}");
            assert_eq!(report.most_elements_sent, 2 * 64 * u64::from(nodes - 1), "{spec}");
        }
    }
}
