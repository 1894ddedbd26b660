//! Max-min fair rates by progressive filling.
//!
//! All flows grow at the same rate until a resource is full; its flows keep their rate, and the
//! others continue to grow. A flow uses each of its resources with a weight: the capacity that one
//! byte takes. After a change, as few flows as possible are computed again. Rates are fair if each
//! flow has its cap, or a *bottleneck*: a full resource on which no other flow is faster. So first
//! only the changed flows are computed, with the capacity that the others leave. Flows that lose
//! their cap or bottleneck are added to the computation, until no more do.

use std::{cmp::Reverse, collections::BinaryHeap};

/// The number of a resource.
pub type ResourceId = u32;

/// The number of a flow.
pub type FlowId = u32;

/// Levels that differ by less are equal, so that equal flows end together.
const SAME: f64 = 1e-9;

/// Rates that change by less than this, as by rounding, are kept.
const ROUNDING: f64 = 1e-12;

/// After this many attempts with a few flows, all connected ones are computed at once.
const ATTEMPTS: usize = 12;

/// A resource that a flow uses, and how much of it one byte takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Use {
    /// The resource.
    pub resource: ResourceId,
    /// The amount that one byte takes; more than 0.
    pub weight: f64,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    used: Use,
    /// The flow's position in the resource's list, while it is active.
    at: u32,
}

#[derive(Debug, Default)]
struct Resource {
    capacity: f64,
    /// The active flows, and which of their places refers to this resource.
    flows: Vec<(FlowId, u32)>,
    is_touched: bool,
    /// The fastest rate of its flows if it is full, otherwise infinite.
    full_at: f64,
    /// Scratch of one computation.
    seen: u64,
    left: f64,
    weights: f64,
    growing: u32,
}

impl Resource {
    /// The rate at which it becomes full.
    fn level(&self) -> f64 {
        if self.growing == 0 { f64::INFINITY } else { (self.left / self.weights).max(0.0) }
    }
}

#[derive(Debug)]
struct Flow {
    places: Vec<Place>,
    /// An upper bound of its rate.
    cap: f64,
    rate: f64,
    is_active: bool,
    /// Scratch of one computation: whether it includes the flow, its rate, and what limits that.
    seen: u64,
    is_settled: bool,
    next: f64,
    limit: Option<ResourceId>,
}

impl Flow {
    /// The rate, as far as it has been computed.
    fn rate_in(&self, round: u64) -> f64 {
        if self.seen == round { self.next } else { self.rate }
    }
}

/// An entry of the heap: a resource, or a flow with a cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Resource(ResourceId),
    Flow(FlowId),
}

/// Resources and flows with their rates.
#[derive(Debug, Default)]
pub struct Fair {
    resources: Vec<Resource>,
    flows: Vec<Flow>,
    touched: Vec<ResourceId>,
    /// Flows that have started, or whose cap or weight has changed.
    changed: Vec<FlowId>,
    round: u64,
    component: (Vec<FlowId>, Vec<ResourceId>),
    heap: BinaryHeap<Reverse<(u64, Limit)>>,
}

/// Rates are never negative, so their bits sort like their values.
fn key(level: f64) -> u64 {
    level.to_bits()
}

impl Fair {
    /// Adds a resource.
    pub fn add_resource(&mut self, capacity: f64) -> ResourceId {
        let full_at = if capacity > 0.0 { f64::INFINITY } else { 0.0 };
        self.resources.push(Resource { capacity, full_at, ..Resource::default() });
        self.resources.len() as u32 - 1
    }

    /// Adds an inactive flow. If it uses a resource several times, give that resource once with the
    /// sum of its weights.
    pub fn add_flow(&mut self, uses: &[Use], cap: f64) -> FlowId {
        let places = uses.iter().map(|&used| Place { used, at: 0 }).collect();
        self.flows.push(Flow {
            places,
            cap,
            rate: 0.0,
            is_active: false,
            seen: 0,
            is_settled: false,
            next: 0.0,
            limit: None,
        });
        self.flows.len() as u32 - 1
    }

    /// The rate of a flow. After changes, call [`compute`](Self::compute) first.
    pub fn rate(&self, flow: FlowId) -> f64 {
        self.flows[flow as usize].rate
    }

    /// The resources that a flow uses.
    pub fn uses(&self, flow: FlowId) -> impl Iterator<Item = Use> + '_ {
        self.flows[flow as usize].places.iter().map(|place| place.used)
    }

    /// Whether a flow is active.
    pub fn is_active(&self, flow: FlowId) -> bool {
        self.flows[flow as usize].is_active
    }

    /// The capacity of a resource.
    pub fn capacity(&self, resource: ResourceId) -> f64 {
        self.resources[resource as usize].capacity
    }

    /// How much of a resource is in use.
    pub fn load(&self, resource: ResourceId) -> f64 {
        let flows = &self.resources[resource as usize].flows;
        let load = |&(flow, place): &(FlowId, u32)| {
            let flow = &self.flows[flow as usize];
            flow.rate * flow.places[place as usize].used.weight
        };
        flows.iter().map(load).sum()
    }

    fn touch(&mut self, resource: ResourceId) {
        let one = &mut self.resources[resource as usize];
        if !std::mem::replace(&mut one.is_touched, true) {
            self.touched.push(resource);
        }
    }

    fn touch_all(&mut self, flow: FlowId) {
        for place in 0..self.flows[flow as usize].places.len() {
            self.touch(self.flows[flow as usize].places[place].used.resource);
        }
    }

    /// Changes a capacity.
    pub fn set_capacity(&mut self, resource: ResourceId, capacity: f64) {
        if self.resources[resource as usize].capacity != capacity {
            self.resources[resource as usize].capacity = capacity;
            self.touch(resource);
        }
    }

    /// Changes the cap of a flow.
    pub fn set_cap(&mut self, flow: FlowId, cap: f64) {
        let one = &mut self.flows[flow as usize];
        if one.cap != cap {
            one.cap = cap;
            if one.is_active {
                self.changed.push(flow);
                self.touch_all(flow);
            }
        }
    }

    /// Changes the weight of a flow on its `place`-th resource.
    pub fn set_weight(&mut self, flow: FlowId, place: usize, weight: f64) {
        let one = &mut self.flows[flow as usize];
        let used = &mut one.places[place].used;
        if used.weight != weight {
            used.weight = weight;
            let resource = used.resource;
            if one.is_active {
                self.changed.push(flow);
                self.touch(resource);
            }
        }
    }

    /// Starts a flow.
    pub fn start(&mut self, flow: FlowId) {
        debug_assert!(!self.flows[flow as usize].is_active);
        self.flows[flow as usize].is_active = true;
        self.changed.push(flow);
        for place in 0..self.flows[flow as usize].places.len() {
            let resource = self.flows[flow as usize].places[place].used.resource;
            let flows = &mut self.resources[resource as usize].flows;
            self.flows[flow as usize].places[place].at = flows.len() as u32;
            flows.push((flow, place as u32));
            self.touch(resource);
        }
    }

    /// Stops a flow, whose rate becomes 0.
    pub fn stop(&mut self, flow: FlowId) {
        debug_assert!(self.flows[flow as usize].is_active);
        self.flows[flow as usize].is_active = false;
        self.flows[flow as usize].rate = 0.0;
        for place in 0..self.flows[flow as usize].places.len() {
            let Place { used, at } = self.flows[flow as usize].places[place];
            let flows = &mut self.resources[used.resource as usize].flows;
            flows.swap_remove(at as usize);
            if let Some(&(moved, its)) = flows.get(at as usize) {
                self.flows[moved as usize].places[its as usize].at = at;
            }
            self.touch(used.resource);
        }
    }

    /// Whether rates have to be computed again.
    pub fn is_stale(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Recomputes the rates that may have changed, and calls `changed(flow, before, now)` for each
    /// that has.
    pub fn compute(&mut self, mut changed: impl FnMut(FlowId, f64, f64)) {
        self.begin();
        for attempt in 1.. {
            self.solve();
            if !self.extend() {
                break;
            }
            if attempt == ATTEMPTS {
                self.connect();
            }
        }
        for &id in &self.component.0 {
            let flow = &mut self.flows[id as usize];
            if (flow.next - flow.rate).abs() > ROUNDING * flow.rate {
                changed(id, flow.rate, flow.next);
                flow.rate = flow.next;
            }
        }
    }

    /// Begins with the changed flows and resources.
    fn begin(&mut self) {
        self.round += 1;
        self.component.0.clear();
        self.component.1.clear();
        while let Some(id) = self.touched.pop() {
            self.resources[id as usize].is_touched = false;
            self.add_resource_to_component(id);
        }
        while let Some(id) = self.changed.pop() {
            if self.flows[id as usize].is_active {
                self.add_flow_to_component(id);
            }
        }
    }

    fn add_resource_to_component(&mut self, id: ResourceId) {
        let seen = &mut self.resources[id as usize].seen;
        if std::mem::replace(seen, self.round) != self.round {
            self.component.1.push(id);
        }
    }

    fn add_flow_to_component(&mut self, id: FlowId) {
        let flow = &mut self.flows[id as usize];
        if std::mem::replace(&mut flow.seen, self.round) == self.round {
            return;
        }
        flow.next = flow.rate;
        self.component.0.push(id);
        for place in 0..self.flows[id as usize].places.len() {
            let resource = self.flows[id as usize].places[place].used.resource;
            self.add_resource_to_component(resource);
        }
    }

    /// Computes the component's rates with the capacity that all others leave.
    fn solve(&mut self) {
        self.heap.clear();
        let Self { resources, flows, component, heap, round, .. } = self;
        for &id in &component.1 {
            let one = &mut resources[id as usize];
            (one.left, one.weights, one.growing) = (one.capacity, 0.0, 0);
            for &(flow, place) in &one.flows {
                let flow = &flows[flow as usize];
                let weight = flow.places[place as usize].used.weight;
                if flow.seen == *round {
                    one.weights += weight;
                    one.growing += 1;
                } else {
                    one.left -= weight * flow.rate;
                }
            }
            if one.growing > 0 {
                heap.push(Reverse((key(one.level()), Limit::Resource(id))));
            }
        }
        for &id in &component.0 {
            let flow = &mut flows[id as usize];
            flow.is_settled = false;
            if flow.cap.is_finite() {
                heap.push(Reverse((key(flow.cap), Limit::Flow(id))));
            }
        }
        let settle = |resources: &mut Vec<Resource>, flow: &mut Flow, rate: f64, limit| {
            flow.is_settled = true;
            for Place { used, .. } in &flow.places {
                let one = &mut resources[used.resource as usize];
                one.left -= used.weight * rate;
                one.weights -= used.weight;
                one.growing -= 1;
            }
            flow.next = rate;
            flow.limit = limit;
        };
        while let Some(Reverse((at, limit))) = heap.pop() {
            match limit {
                Limit::Flow(id) => {
                    let flow = &mut flows[id as usize];
                    let cap = flow.cap;
                    if !flow.is_settled {
                        settle(resources, flow, cap, None);
                    }
                }
                Limit::Resource(id) => {
                    let level = resources[id as usize].level();
                    if level.is_infinite() {
                        continue;
                    }
                    // Some of its flows have settled at a lower rate, so it fills later.
                    if level > f64::from_bits(at) * (1.0 + SAME) {
                        heap.push(Reverse((key(level), limit)));
                        continue;
                    }
                    for place in 0..resources[id as usize].flows.len() {
                        let (flow, _) = resources[id as usize].flows[place];
                        let flow = &mut flows[flow as usize];
                        if flow.seen == *round && !flow.is_settled {
                            let rate = level.min(flow.cap);
                            settle(resources, flow, rate, Some(id));
                        }
                    }
                }
            }
        }
    }

    /// Adds the flows that no longer have their cap or a bottleneck. Returns whether there are any.
    fn extend(&mut self) -> bool {
        let (flows_before, resources_before) = (self.component.0.len(), self.component.1.len());
        for at in 0..resources_before {
            let id = self.component.1[at];
            let (used, fastest) = self.use_of(id);
            let one = &mut self.resources[id as usize];
            let is_full = used >= one.capacity * (1.0 - SAME);
            let full_at = if is_full { fastest } else { f64::INFINITY };
            let before = std::mem::replace(&mut one.full_at, full_at);
            let is_too_full = used > one.capacity * (1.0 + SAME);
            // A resource that is not full is not a bottleneck; nor is one that is full at a lower
            // rate, for faster flows.
            one.is_touched = is_too_full
                || (full_at - before).abs() > SAME * before
                || full_at.is_infinite() != before.is_infinite();
        }
        for at in 0..resources_before {
            let id = self.component.1[at] as usize;
            if !std::mem::take(&mut self.resources[id].is_touched) {
                continue;
            }
            let capacity = self.resources[id].capacity * (1.0 + SAME);
            let is_too_full = self.use_of(id as u32).0 > capacity;
            for place in 0..self.resources[id].flows.len() {
                let (flow, _) = self.resources[id].flows[place];
                let is_other = self.flows[flow as usize].seen != self.round;
                if is_other && (is_too_full || !self.is_limited(flow)) {
                    self.add_flow_to_component(flow);
                }
            }
        }
        // A limit caused by faster flows outside the component does not count.
        for at in 0..flows_before {
            let id = self.component.0[at];
            let Some(limit) = self.flows[id as usize].limit.filter(|_| !self.is_limited(id)) else {
                continue;
            };
            let rate = self.flows[id as usize].next * (1.0 + SAME);
            for place in 0..self.resources[limit as usize].flows.len() {
                let (flow, _) = self.resources[limit as usize].flows[place];
                let other = &self.flows[flow as usize];
                if other.seen != self.round && other.rate > rate {
                    self.add_flow_to_component(flow);
                }
            }
        }
        self.component.0.len() > flows_before
    }

    /// How much of a resource is in use, and the fastest rate of its flows.
    fn use_of(&self, id: ResourceId) -> (f64, f64) {
        let flows = self.resources[id as usize].flows.iter();
        flows.fold((0.0, 0.0), |(used, fastest), &(flow, place)| {
            let flow = &self.flows[flow as usize];
            let rate = flow.rate_in(self.round);
            (used + rate * flow.places[place as usize].used.weight, rate.max(fastest))
        })
    }

    /// Whether a flow has its cap or a bottleneck.
    fn is_limited(&self, id: FlowId) -> bool {
        let flow = &self.flows[id as usize];
        let full_at = |place: &Place| self.resources[place.used.resource as usize].full_at;
        let least = flow.places.iter().map(full_at).fold(flow.cap, f64::min);
        flow.rate_in(self.round) >= least * (1.0 - SAME)
    }

    /// Adds all flows and resources connected with the component.
    fn connect(&mut self) {
        let mut next = 0;
        while let Some(&id) = self.component.1.get(next) {
            next += 1;
            for at in 0..self.resources[id as usize].flows.len() {
                let (flow, _) = self.resources[id as usize].flows[at];
                self.add_flow_to_component(flow);
            }
        }
    }
}
